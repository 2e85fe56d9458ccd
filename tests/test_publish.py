"""What would be uploaded, file by file: enough to load from, and nothing that is nobody else's business."""

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from datasets import DatasetDict, load_dataset
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from helpers import make_model, make_tokenizer
from huggingface_hub import DatasetCard, HfApi, ModelCard
from peft import LoraConfig
from test_cards import BEFORE_AFTER, make_report
from test_trainer import make_dataset, make_trainer
from transformers import AutoModelForCausalLM, pipeline

from erpo_trl import ERPOConfig, ERPOTrainer, cards, score_queries
from erpo_trl.evaluation.storage import write_json
from erpo_trl.scoring import SCORE_COLUMNS, QueryScorer, ScoreIdentity
from erpo_trl.tiny import MODEL_PATH


TOKEN = "hf_" + "secret" * 5
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
MODEL = {"README.md", "config.json", "generation_config.json", "model.safetensors"} | TOKENIZER
ADAPTER = {"README.md", "adapter_config.json", "adapter_model.safetensors"} | TOKENIZER


class FakeHub:
    """Keeps in a folder what `HfApi` would have sent: `<folder>/<repo id>/…`, and the names of each upload's files."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.uploads, self.validated = folder, [], []
        methods = ("create_repo", "upload_folder", "upload_file", "create_commit", "repo_info", "preupload_lfs_files")
        for name in methods:
            monkeypatch.setattr(HfApi, name, getattr(self, name))
        monkeypatch.setattr(HfApi, "_validate_yaml", self.validate_yaml)
        monkeypatch.setattr("huggingface_hub.repocard.upload_file", self.upload_file)
        monkeypatch.setattr("huggingface_hub.repocard.RepoCard.validate", lambda card, repo_type=None: None)
        monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", lambda repo, name, **_: folder / repo / name)
        monkeypatch.setattr("datasets.arrow_dataset.DirFileSystem", self.filesystem)
        monkeypatch.setattr("datasets.dataset_dict.DirFileSystem", self.filesystem, raising=False)

    def keep(self, repo_id, path_in_repo, content: bytes):
        path = self.folder / repo_id / path_in_repo
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def files(self, repo_id) -> dict[str, bytes]:
        root = self.folder / repo_id
        return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def filesystem(self, fs, path):
        repo_id = str(path).removeprefix("datasets/").partition("@")[0]
        return DirFileSystem(path=str(self.folder / repo_id), fs=LocalFileSystem())

    def validate_yaml(self, content, *, repo_type=None, token=None):
        assert isinstance(yaml.safe_load(content.split("---\n")[1]), dict)
        self.validated.append(content)

    def create_repo(self, repo_id, **options):
        self.created = options
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def repo_info(self, repo_id, **_):
        return SimpleNamespace(id=repo_id, sha="0" * 40)

    def upload_folder(
        self, *, repo_id, folder_path, path_in_repo="", allow_patterns=None, ignore_patterns=(), **options
    ):
        ignore_patterns = [*ignore_patterns, ".git", ".git/*", ".cache/huggingface/*"]
        additions = HfApi()._prepare_upload_folder_additions(
            folder_path, path_in_repo, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        for addition in additions:
            self.keep(repo_id, addition.path_in_repo, Path(addition.path_or_fileobj).read_bytes())
        self.uploads.append({addition.path_in_repo for addition in additions})
        done = Future()
        done.set_result(None)
        return done

    def upload_file(self, *, repo_id, path_or_fileobj, path_in_repo, **_):
        content = Path(path_or_fileobj).read_bytes() if isinstance(path_or_fileobj, str | Path) else path_or_fileobj
        self.keep(repo_id, path_in_repo, content)

    def preupload_lfs_files(self, repo_id, additions, **_):
        self.create_commit(repo_id, additions)

    def create_commit(self, repo_id, operations, **_):
        for operation in operations:
            source = operation.path_or_fileobj
            if isinstance(source, bytes):
                self.keep(repo_id, operation.path_in_repo, source)
            elif Path(source).is_file():  # `datasets` deletes a shard as soon as it is sent
                self.keep(repo_id, operation.path_in_repo, Path(source).read_bytes())


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return FakeHub(tmp_path / "fake", monkeypatch)


def check_private(hub, repo_id, tmp_path):
    """No token, no optimizer state, no path of this machine in any uploaded byte."""
    for name, content in hub.files(repo_id).items():
        assert not {"optimizer", "scheduler", "rng_state", "training_args"} & set(name.replace(".", "/").split("/"))
        for private in (TOKEN, str(tmp_path), str(Path(MODEL_PATH).parents[2]), str(Path.home()) + "/"):
            assert private.encode() not in content, (name, private)


# Models


def make_run(tmp_path, model=MODEL_PATH, peft_config=None, **options):
    args = ERPOConfig(
        str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        num_generations=2,
        per_device_train_batch_size=4,
        max_completion_length=6,
        learning_rate=1e-2,
        hub_model_id="me/erpo",
        hub_token=TOKEN,
        model_init_kwargs={"dtype": "float32"},
        **{"max_steps": 2, "save_strategy": "no"} | options,
    )

    def reward(completions, **kwargs):
        return [float(i) for i in range(len(completions))]

    return ERPOTrainer(model, reward, args, make_dataset(), peft_config=peft_config)


def test_a_pushed_model_loads_from_what_was_uploaded(tmp_path, cache, hub):
    trainer = make_run(tmp_path, save_strategy="steps", save_steps=2)
    trainer.train()
    out = tmp_path / "out"
    (out / "runs").mkdir(exist_ok=True)
    (out / "runs" / "events.out.tfevents.1.my-host.2").write_bytes(str(tmp_path).encode())
    (out / "notes.txt").write_text(str(tmp_path))
    (out / "training.png").write_bytes(b"figure")
    write_json(out / "before_after.json", BEFORE_AFTER)
    trainer.save_state()
    evaluations = cards.find_evaluations(out)
    trainer.push_to_hub(method="erpo", dataset_name="org/questions", evaluations=evaluations)
    assert hub.uploads == [MODEL | {"training.png", "before_after.json"}]
    check_private(hub, "me/erpo", tmp_path)
    # That asserts something: the secrets are in the folder, and were not uploaded
    assert TOKEN.encode() in (out / "training_args.bin").read_bytes()
    assert (out / "checkpoint-2" / "optimizer.pt").is_file()

    pushed = hub.folder / "me" / "erpo"
    assert len(ModelCard.load(pushed / "README.md").data.eval_results) == 4
    assert hub.validated == [(pushed / "README.md").read_text()]
    loaded, trained = AutoModelForCausalLM.from_pretrained(pushed), trainer.model
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), trained.parameters(), strict=True))
    generator = pipeline("text-generation", model=str(pushed))
    chat = [{"role": "user", "content": "What is 1 + 1?"}]
    said = generator(chat, max_new_tokens=5, do_sample=False, return_full_text=False)[0]["generated_text"]
    tokenizer = trainer.processing_class
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    wanted = trained.generate(**ids.to(trained.device), max_new_tokens=5, do_sample=False)
    assert said == tokenizer.decode(wanted[0, ids["input_ids"].size(1) :], skip_special_tokens=True)


@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_pushes_during_training(tmp_path, cache, hub, strategy):
    """`hub_strategy="checkpoint"` asks for the optimizer's state, to resume from; the token is not part of it."""
    pushing = {"push_to_hub": True, "hub_strategy": strategy, "hub_always_push": True}
    trainer = make_run(tmp_path, save_strategy="steps", save_steps=2, **pushing)
    trainer.train()
    assert hub.uploads[0] == MODEL
    last = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"} | MODEL - {"README.md"}
    assert hub.uploads[1:] == ([{f"last-checkpoint/{name}" for name in last}] if strategy == "checkpoint" else [])
    for name, content in hub.files("me/erpo").items():
        assert TOKEN.encode() not in content and str(tmp_path).encode() not in content, name
    # What the Trainer uploads afterwards is as it was
    from transformers.utils.hub import hf_api

    assert "upload_folder" not in vars(hf_api())


def lora():
    return LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


def test_a_lora_run_publishes_an_adapter(tmp_path, cache, hub, hub_cache):
    trainer = make_run(tmp_path, "org/base", lora(), max_steps=1)
    trainer.train()
    trainer.push_to_hub()
    assert hub.uploads == [ADAPTER]
    check_private(hub, "me/erpo", tmp_path)
    pushed = hub.folder / "me" / "erpo"
    card = ModelCard.load(pushed / "README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "org/base")
    loaded = AutoModelForCausalLM.from_pretrained(pushed).eval()
    ids = torch.arange(5, 15)[None]
    with torch.no_grad():
        wanted, plain = trainer.model.eval()(ids).logits, AutoModelForCausalLM.from_pretrained("org/base")(ids).logits
        assert torch.allclose(loaded(ids).logits, wanted, atol=1e-5) and not torch.allclose(plain, wanted, atol=1e-2)
    assert pipeline("text-generation", model=str(pushed))("What", max_new_tokens=2)[0]["generated_text"]


def test_an_adapter_on_a_local_model_is_not_published(tmp_path, cache, hub):
    with pytest.raises(ValueError, match="adapter's base model, .* is not on the Hub"):
        make_run(tmp_path, MODEL_PATH, lora()).push_to_hub()
    with pytest.raises(ValueError, match="Push the base model first"):  # before any training
        make_run(tmp_path, MODEL_PATH, lora(), push_to_hub=True)
    trainer = make_run(tmp_path, MODEL_PATH, lora())
    trainer.save_model()
    with pytest.raises(ValueError, match="is not on the Hub"):
        cards.push_folder(tmp_path / "out", "me/erpo")
    assert not hub.uploads


def test_push_folder_after_an_evaluation(tmp_path, cache, hub):
    trainer = make_run(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card("mine")
    (tmp_path / "out" / "evaluation").mkdir()
    write_json(tmp_path / "out" / "evaluation" / "report.json", make_report())
    cards.push_folder(tmp_path / "out", "me/erpo", private=True, token=TOKEN)
    assert hub.uploads == [MODEL] and hub.created == {"exist_ok": True, "private": True, "token": TOKEN}
    check_private(hub, "me/erpo", tmp_path)
    data = ModelCard.load(hub.folder / "me" / "erpo" / "README.md").data
    assert len(data.eval_results) == 6 and data.model_name == "mine"
    with pytest.raises(FileNotFoundError, match="no README.md"):
        cards.push_folder(tmp_path, "me/erpo")


# Scored datasets


@pytest.fixture
def scored(cache):
    return score_queries(make_dataset(level=list(range(8))), make_model("qwen2"), make_tokenizer(), weight_max=3.0)


def download(hub, repo_id, tmp_path, split="train"):
    """As `load_dataset` reads a Hub dataset: by the card's metadata, from parquet."""
    return load_dataset(str(hub.folder / repo_id), split=split, cache_dir=str(tmp_path / "datasets"))


@pytest.fixture
def never_scores(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("a forward to score prompts")

    monkeypatch.setattr(QueryScorer, "_logps", fail)


def test_scored_dataset_comes_back_as_it_was(tmp_path, hub, scored):
    cards.push_scored(scored, "me/scored", "org/questions", token=TOKEN)
    assert set(hub.files("me/scored")) == {"README.md", "data/train-00000-of-00001.parquet"}
    check_private(hub, "me/scored", tmp_path)
    card = DatasetCard.load(hub.folder / "me" / "scored" / "README.md")
    assert card.data.source_datasets == ["org/questions"] and {"erpo", "trl"} <= set(card.data.tags)
    assert card.data.configs and card.data.dataset_info["features"]
    back = download(hub, "me/scored", tmp_path)
    assert back.features == scored.features and back.to_dict() == scored.to_dict()
    identity = ScoreIdentity.parse(back[0]["ref_query_id"])
    assert identity == ScoreIdentity.parse(scored[0]["ref_query_id"])
    nll = -torch.tensor(back["ref_query_logp"], dtype=torch.float64)
    assert identity.mean_nll == pytest.approx(nll.mean().item(), rel=1e-6)
    assert back["query_weight"] == pytest.approx((identity.mean_nll / nll).clamp(0.5, 3.0).tolist(), rel=1e-5)
    assert all(row["ref_query_logp"] == pytest.approx(sum(row["ref_query_logps"]), rel=1e-5) for row in back)


def test_splits_come_back(tmp_path, hub, scored):
    cards.push_scored(DatasetDict(train=scored, test=scored.select([1, 0])), "me/scored")
    assert download(hub, "me/scored", tmp_path, "test").to_dict() == scored.select([1, 0]).to_dict()
    assert "Rows (8 train, 2 test)" in (hub.folder / "me" / "scored" / "README.md").read_text()


def test_trainer_takes_a_pushed_dataset_without_scoring(tmp_path, hub, scored, never_scores):
    cards.push_scored(scored, "me/scored")
    trainer = make_trainer(tmp_path, dataset=download(hub, "me/scored", tmp_path), query_weight_max=3.0, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["query_kl"] < 1e-9


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"temperature": 0.7}, "scored with temperature = 1.0, and this trainer has 0.7"),
        ({"query_scope": "prompt"}, "scored with scope = 'query', and this trainer has 'prompt'"),
        ({"query_weight_max": 2.0}, "scored with weight_max = 3.0, and this trainer has 2.0"),
        ({"query_weight_normalize": True}, "weights are not normalized"),
        ({"tokenizer": make_tokenizer(add_bos=True)}, "another tokenizer"),
        ({"model": make_model("qwen2", seed=1)}, "the scores are another model's"),
    ],
)
def test_trainer_refuses_a_pushed_dataset_with_the_reason(tmp_path, hub, scored, never_scores, options, reason):
    cards.push_scored(scored, "me/scored")
    dataset = download(hub, "me/scored", tmp_path)
    with pytest.raises(ValueError, match=reason):
        make_trainer(tmp_path, dataset=dataset, **{"query_weight_max": 3.0} | options).train()


def test_a_column_lost_on_the_way_is_refused(tmp_path, hub, scored):
    cards.push_scored(scored, "me/scored")
    for column in SCORE_COLUMNS:
        dataset = download(hub, "me/scored", tmp_path).remove_columns(column)
        with pytest.raises(ValueError, match=f"but not {column}"):
            make_trainer(tmp_path, dataset=dataset, query_weight_max=3.0)
        with pytest.raises(ValueError, match=f"no column {column}"):
            cards.push_scored(dataset, "me/scored")


def test_scoring_recipe_leaves_a_card(tmp_path, scored):
    from erpo_trl.prompts import load_prompts

    rows = scored.add_column("answer", ["1"] * len(scored))
    rows.save_to_disk(tmp_path / "scored")
    cards.scored_dataset_card(rows).save(tmp_path / "scored" / "README.md")
    back, _ = load_prompts(str(tmp_path / "scored"))
    assert back["ref_query_id"] == scored.select(range(len(back)))["ref_query_id"]
