"""The recipes as a user launches them, on the embedded default."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import pytest
from datasets import load_from_disk

from erpo_trl.methods import METHODS
from erpo_trl.tiny import MODEL_PATH


RECIPES = Path(__file__).parent.parent / "recipes"
QUICK = {
    "max_steps": 1,
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "steps_per_generation": 1,
    "max_completion_length": 12,
    "eval_questions": 0,
}


@pytest.fixture
def launch(monkeypatch, tmp_path, cache):
    monkeypatch.syspath_prepend(str(RECIPES))
    monkeypatch.chdir(tmp_path)

    def run(recipe: str, *arguments, config: str | None = "tiny", **options):
        argv = [recipe, *(["--config", str(RECIPES / "configs" / f"{config}.yaml")] if config else []), *arguments]
        for key, value in options.items():
            argv += [f"--{key}", str(value)]
        monkeypatch.setattr(sys, "argv", argv)
        return importlib.import_module(recipe).main()

    return run


def log_of(folder: Path) -> list[dict]:
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(launch, tmp_path, method, capsys):
    launch("train_math", output_dir=tmp_path / "out", method=method, **QUICK | {"max_steps": 2})
    last = [entry for entry in log_of(tmp_path / "out") if "loss" in entry][-1]
    uses = METHODS[method].options
    assert ("query_kl" in last) == (uses["query_kl_coef"] > 0 or uses["use_query_weight"] or uses["beta"] > 0)
    assert ("query_weight/mean" in last) == uses["use_query_weight"]
    assert last.get("query_kl_loss", 0) == pytest.approx(uses["query_kl_coef"] * last.get("query_kl", 0))
    assert any("overlong" in key for key in last) == METHODS[method].soft_overlong_punishment
    assert f"{method}:" in capsys.readouterr().out


def test_the_command_line_wins_over_the_method(launch, tmp_path, capsys):
    launch("train_math", output_dir=tmp_path / "out", method="grpo", beta=0.5, query_kl_coef=0.25, **QUICK)
    printed = " ".join(capsys.readouterr().out.split())
    assert "beta=0.5" in printed and "query_kl_coef=0.25" in printed and "use_query_weight=False" in printed


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"device_map": "auto", "chat_template_kwargs": '{"thinking": true}'}])
def test_score_once_then_train_without_scoring(launch, tmp_path, options):
    launch("score_queries", config=None, save_to=tmp_path / "scored", **options)
    scored = load_from_disk(str(tmp_path / "scored"))
    assert {"prompt", "solution", "ref_query_logps", "ref_query_id"} <= set(scored.column_names)
    for part in (tmp_path / "scores").rglob("*.npz"):
        part.unlink()
    options.pop("device_map", None)
    launch("train_math", output_dir=tmp_path / "out", dataset_name=tmp_path / "scored", **QUICK | options)
    assert log_of(tmp_path / "out")[0]["query_kl"] < 1e-6
    assert not list((tmp_path / "scores").rglob("*.npz"))


@pytest.mark.slow
def test_a_run_goes_on_from_its_last_whole_checkpoint(launch, tmp_path):
    options = QUICK | {"save_strategy": "steps", "save_steps": 1, "output_dir": tmp_path / "out"}
    launch("train_math", **options | {"max_steps": 2})
    (tmp_path / "out" / "checkpoint-9").mkdir()  # cut off while it was written
    launch("train_math", **options | {"max_steps": 3})
    steps = [entry["step"] for entry in log_of(tmp_path / "out") if "loss" in entry]
    assert steps == [1, 2, 3]
    times = (tmp_path / "out" / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns
    weights = (tmp_path / "out" / "model.safetensors").read_bytes()
    launch("train_math", **options | {"max_steps": 3})  # finished: nothing is trained, nothing overwritten
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == weights
    with pytest.raises(
        ValueError, match="holds a run with --method erpo, and this one has grpo. Type another --output_dir"
    ):
        launch("train_math", **options | {"max_steps": 4, "method": "grpo"})
    launch("train_math", **options | {"max_steps": 1, "resume_from_checkpoint": "false"})
    assert (tmp_path / "out" / "checkpoint-1" / "trainer_state.json").stat().st_mtime_ns > times


def test_a_local_dataset_and_a_local_model_of_the_users_own(launch, tmp_path, capsys):
    shutil.copytree(MODEL_PATH, tmp_path / "model")
    rows = [{"problem": f"What is {i} + {i}?", "solution": f"It is \\boxed{{{2 * i}}}."} for i in range(8)]
    rows += [{"problem": "What is 1 + 1?", "solution": "no box"}, rows[0]]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    launch(
        "train_math",
        output_dir=tmp_path / "out",
        dataset_name=tmp_path / "mine.jsonl",
        model_name_or_path=tmp_path / "model",
        **QUICK,
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert "golds: kept 9, dropped 1" in printed and "duplicates: kept 8, dropped 1" in printed


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"query_kl_coeff": 0.1}, ValueError, "Unknown option --query_kl_coeff. Did you mean --query_kl_coef?"),
        ({"method": "erp"}, ValueError, "Type --method <one of: grpo, grpo_qw"),
        (
            {"dataset_name": "./nowhere"},
            FileNotFoundError,
            "There is no file or folder './nowhere'. Type --dataset_name",
        ),
        (
            {"dataset_name": "mine.jsonl", "answer_column": "gold"},
            ValueError,
            "there are: problem, answer. Type --answer",
        ),
        ({"model_name_or_path": "./nowhere"}, FileNotFoundError, "no folder './nowhere'.* Type --model_name_or_path"),
        ({"config": "tinny"}, FileNotFoundError, "tinny.yaml"),
        ({"method": "reinforce", "steps_per_generation": 2}, ValueError, "Type --steps_per_generation 1"),
        ({"query_kl_level": "word"}, (ValueError, SystemExit), None),
    ],
)
def test_mistakes(launch, tmp_path, options, error, message, capsys):
    (tmp_path / "mine.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    with pytest.raises(error, match=message):
        launch("train_math", output_dir=tmp_path / "out", **QUICK | options)


@pytest.mark.slow
def test_the_embedded_default_learns(launch, tmp_path):
    """What `make train` does: to 0.8 and more on held-out questions, from between 0.25 and 0.5, at temperature 1."""
    launch("train_math", output_dir=tmp_path / "out")
    table = json.loads((tmp_path / "out" / "before_after.json").read_text())
    by_temperature = {name: {row["temperature"]: row["avg@k"] for row in table[name]} for name in ("before", "after")}
    assert set(by_temperature["before"]) == {0.1, 0.6, 1.0, 1.5}
    assert 0.25 <= by_temperature["before"][1.0] <= 0.5
    assert by_temperature["after"][1.0] >= 0.8
    assert (tmp_path / "out" / "training.png").stat().st_size > 10_000
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "README.md").exists()
