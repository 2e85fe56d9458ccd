"""Cards: parsed back by huggingface_hub, true to what ran, and without a path of this machine."""

import json
from pathlib import Path

import pytest
import yaml
from datasets import Dataset, DatasetDict
from helpers import COMMIT, make_model, make_tokenizer
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from test_trainer import OFF, make_dataset, make_trainer

from erpo_trl import ERPOConfig, ERPOTrainer, cards, score_queries
from erpo_trl.evaluation.report import Evaluation, build_report
from erpo_trl.scoring import SCORE_COLUMNS, ScoreIdentity
from erpo_trl.tiny import MODEL_PATH


def check_metadata(path: Path) -> ModelCard:
    """What the Hub's own validation looks at, and that huggingface_hub reads the same back."""
    content = path.read_text()
    metadata = yaml.safe_load(content.split("---\n")[1])
    card = ModelCard.load(path)
    assert card.data.to_dict() == metadata
    assert metadata["library_name"] in ("transformers", "peft") and metadata["pipeline_tag"] == "text-generation"
    assert metadata["tags"] == sorted(set(metadata["tags"])) and all(type(tag) is str for tag in metadata["tags"])
    assert "licence" not in metadata
    for repo in [metadata.get("base_model"), metadata.get("datasets")]:
        if repo is not None:
            validate_repo_id(repo)
    assert "None" not in content and "/tmp" not in content and str(Path.home()) + "/" not in content
    return card


BEFORE_AFTER = {
    "benchmark": "arithmetic",
    "before": [
        {"temperature": t, "k": 4, "questions": 100, "avg@k": 0.25, "pass@k": 0.5}
        | {"avg@k_interval": [0.2, 0.3], "pass@k_interval": [0.4, 0.6]}
        for t in (0.1, 1.0)
    ],
    "after": [
        {"temperature": t, "k": 4, "questions": 100, "avg@k": 0.75 - t / 10, "pass@k": 0.875}
        | {"avg@k_interval": [0.7, 0.8], "pass@k_interval": [0.8, 0.9]}
        for t in (0.1, 1.0)
    ],
}


def test_card_of_a_hub_model(tmp_path, cache, hub_cache):
    trainer = make_trainer(
        tmp_path,
        model="org/base",
        query_kl_coef=0.05,
        query_kl_estimator="k2",
        query_kl_level="sequence",
        query_scope="prompt",
        query_weight_max=3.0,
        model_init_kwargs={"dtype": "float32"},
        max_steps=1,
    )
    trainer.train()
    evaluations = [cards.before_after_evaluation(BEFORE_AFTER)]
    trainer.create_model_card("my-model", "org/questions", method="dapo_erpo", evaluations=evaluations)
    card = check_metadata(tmp_path / "out" / "README.md")
    assert (card.data.base_model, card.data.datasets) == ("org/base", "org/questions")
    assert set(card.data.tags) == {"erpo", "generated_from_trainer", "trl"}
    from importlib.metadata import version

    for words in (
        f"fine-tuned version of [org/base](https://huggingface.co/org/base) (revision `{COMMIT}`)",
        "on the [org/questions](https://huggingface.co/datasets/org/questions) dataset",
        "| Method | `dapo_erpo` |",
        "| Query-KL coefficient α | 0.05 |",
        "| Query-KL estimator, level | k2, sequence |",
        "| Query scope | prompt |",
        "| Query weight | clipped to [0.5, 3.0] |",
        "| Policy-KL coefficient β | 0.0 |",
        f"| Base model | org/base, revision `{COMMIT}` |",
        "| Training set | org/questions, 8 rows |",
        f"| Score identity | `{trainer._query_identity}` |",
        "| Optimizer steps | 1 |",
        f"- TRL: {version('trl')}",
        f"- Transformers: {version('transformers')}",
        "arXiv:2608.23311",
        "@software{vonwerra2020trl",
        "| 0.1 | 0.250 [0.200, 0.300] | 0.740 [0.700, 0.800] | 0.500 [0.400, 0.600] | 0.875 [0.800, 0.900] |",
        'model="my-model"',
    ):
        assert words in card.text, words
    results = {(r.dataset_name, r.metric_name): r.metric_value for r in card.data.eval_results}
    assert results == {
        ("arithmetic", "Avg@4 at T = 0.1"): 0.74,
        ("arithmetic", "Pass@4 at T = 0.1"): 0.875,
        ("arithmetic", "Avg@4 at T = 1"): 0.65,
        ("arithmetic", "Pass@4 at T = 1"): 0.875,
    }
    assert card.data.model_name == "my-model"


def test_card_of_a_local_model_names_no_path(tmp_path, cache, monkeypatch):
    dataset = tmp_path / "questions"
    dataset.mkdir()
    trainer = make_trainer(tmp_path, model=MODEL_PATH, model_init_kwargs={"dtype": "float32"})
    trainer.create_model_card(dataset_name=str(dataset))
    card = check_metadata(tmp_path / "out" / "README.md")
    assert card.data.base_model is None and card.data.datasets is None and card.data.eval_results is None
    assert "is a fine-tuned version of a model that is not on the Hub." in card.text
    assert "| Base model | not on the Hub |" in card.text and "| Training set | not on the Hub, 8 rows |" in card.text
    assert "| Method | ERPO |" in card.text and "# Model Card for out" in card.text
    # A relative path looks like a Hub id as soon as the working directory changes
    trainer.model.config._name_or_path = "runs/tiny"
    trainer.create_model_card()
    card = check_metadata(tmp_path / "out" / "README.md")
    assert card.data.base_model is None and "runs/tiny" not in card.text


def test_card_of_a_run_without_erpo_says_grpo(tmp_path, cache):
    trainer = make_trainer(tmp_path, **OFF)
    trainer.create_model_card("my-model")
    card = check_metadata(tmp_path / "out" / "README.md")
    assert "| Method | GRPO |" in card.text and "trained with GRPO" in card.text and "2402.03300" in card.text
    assert "2608.23311" not in card.text and "Score identity" not in card.text and "erpo" not in card.data.tags


def test_card_of_an_adapter(tmp_path, cache, hub_cache):
    from peft import LoraConfig

    args = ERPOConfig(str(tmp_path / "out"), use_cpu=True, bf16=False, report_to=[], num_generations=2)
    args.per_device_train_batch_size = 2
    trainer = ERPOTrainer(
        "org/base",
        lambda completions, **kwargs: [0.0] * len(completions),
        args,
        make_dataset(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
    )
    trainer.save_model()  # PEFT writes a card of its own
    trainer.create_model_card()
    card = check_metadata(tmp_path / "out" / "README.md")
    assert card.data.library_name == "peft" and card.data.base_model == "org/base" and "lora" in card.data.tags


def sample(question, i, correct):
    found = {"question": question, "sample": i, "correct": correct}
    return found | {"answer": "1", "format": 1.0, "tokens": 3, "truncated": False}


def make_report(names=("ERPO",)):
    """Two questions, two samples each: three of four right, Pass@2 = 1."""
    samples = [sample(0, 0, 1.0), sample(0, 1, 1.0), sample(1, 0, 0.0), sample(1, 1, 1.0)]
    settings = {"k": 2, "questions": 2, "without_gold": 0, "repeated": 0, "golds": "x", "model": "/home/me/out"}
    cells = [("math500", 0.1), ("math500", 1.0), ("mine", 0.1), ("mine", 1.0)]
    return build_report(
        [Evaluation(name, dict.fromkeys(cells, samples), dict.fromkeys(cells, settings)) for name in names]
    )


def test_report_on_the_card():
    report = json.loads(json.dumps(make_report()))
    table, results = cards.report_evaluation(report)
    assert "| benchmark | Avg@2 | Pass@2 | Pass@1 |" in table and "/home" not in table
    rows = {line.split(" | ")[0].strip("| "): line for line in table.splitlines()}
    assert rows["math500"].count("0.750 [") == 1 and "1.000 [1.000, 1.000]" in rows["math500"]
    assert {r.dataset_name: r.dataset_type for r in results} == {"math500": "HuggingFaceH4/MATH-500", "mine": "mine"}
    assert {(r.dataset_name, r.metric_name): r.metric_value for r in results} == {
        (name, f"{metric}, mean over T = 0.1, 1"): value
        for name in ("math500", "mine")
        for metric, value in {"Avg@2": 0.75, "Pass@2": 1.0, "Pass@1": 0.5}.items()
    }


def test_report_of_several_models_asks_which():
    report = make_report(["a", "b"])
    with pytest.raises(ValueError, match="of the models a, b: pass `model=`"):
        cards.report_evaluation(report)
    assert len(cards.report_evaluation(report, "b")[1]) == 6


def test_evaluations_replace_those_before(tmp_path):
    card = ModelCard("---\nmodel_name: m\n---\n# M\n\n### Framework versions\n\n- TRL: 1\n")
    first, second = cards.before_after_evaluation(BEFORE_AFTER), cards.report_evaluation(make_report())
    cards.with_evaluations(card, [first])
    cards.with_evaluations(card, [second])
    assert card.text.count("### Evaluation") == 1 and first[0] not in card.text and second[0] in card.text
    assert card.text.index("### Evaluation") < card.text.index("### Framework versions")
    card.save(tmp_path / "README.md")
    assert len(ModelCard.load(tmp_path / "README.md").data.eval_results) == 6


def test_hub_names(tmp_path, monkeypatch, hub_cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    for name in (None, "", "runs/tiny", str(tmp_path), "/gone/model", "a/b/c", "../x", "~/models"):
        assert cards.hub_repo(name) is None and cards.hub_model(name) is None
    assert cards.hub_repo("org/name") == "org/name"
    assert cards.hub_model("org/name") is None  # never loaded
    assert cards.hub_model("org/base") == cards.hub_model("org/base", COMMIT) == ("org/base", COMMIT)


def scored(tmp_path, **options):
    return score_queries(make_dataset(), make_model(), make_tokenizer(), cache_dir=tmp_path / "scores", **options)


def test_scored_dataset_card(tmp_path):
    dataset = scored(tmp_path, weight_max=3.0)
    card = cards.scored_dataset_card(dataset, "org/questions")
    metadata = yaml.safe_load(str(card).split("---\n")[1])
    assert metadata == {
        "tags": ["erpo", "trl"],
        "task_categories": ["text-generation"],
        "source_datasets": ["org/questions"],
    }
    identity = ScoreIdentity.parse(dataset[0]["ref_query_id"])
    for column in SCORE_COLUMNS:
        assert f"| `{column}` | " in card.text
    for line in (
        f"| `mean_nll` | `{identity.mean_nll}` | s̄, nats |",
        f"| `start` | `{identity.start}` |",
        "| `weight_max` | `3.0` |",
        "Rows (8): the prompts of [org/questions]",
        "From the dataset itself: `prompt`.",
    ):
        assert line in card.text, line
    # Again, on its own card: nothing twice
    assert str(cards.scored_dataset_card(dataset, "org/questions", card)).count("# Scored prompts") == 1


def test_scored_dataset_card_of_splits_and_local_source(tmp_path):
    dataset = scored(tmp_path)
    card = cards.scored_dataset_card(DatasetDict(train=dataset, test=dataset.select([0])), str(tmp_path))
    assert "Rows (8 train, 1 test): prompts, scored under" in card.text
    assert "source_datasets" not in card.data.to_dict() and str(tmp_path) not in str(card)


def test_card_of_an_unscored_dataset_is_refused():
    with pytest.raises(ValueError, match="no column ref_query_logps, .* score it"):
        cards.scored_dataset_card(Dataset.from_dict({"prompt": ["x"]}))
