"""The commands, on the embedded default, as a user gives them."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from erpo_trl import tiny
from erpo_trl.evaluation.consistency import TRAIN_ACCURACY


RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ("--benchmarks", "arithmetic", "--limit", "6", "--k", "2", "--max_new_tokens", "48")


@pytest.fixture
def recipe(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(RECIPES / f"{name}.py"), run_name="__main__")

    return run


def test_evaluate_and_compare(recipe, tmp_path, capsys):
    own = tmp_path / "own.jsonl"
    own.write_text('{"question": "What is 2 + 3?", "answer": 5}\n{"question": "What is 1 + 1?", "answer": null}\n')
    options = ("--model", tiny.MODEL_PATH, *SMALL, "--temperatures", "0", "1.0", "--benchmark", own)
    recipe("evaluate", *options, "--output_dir", "a")
    assert "own: 1 questions (0 of them repeated), 1 without an answer left out" in capsys.readouterr().out
    report = json.loads((tmp_path / "a" / "report.json").read_text())
    samples = pq.read_table(tmp_path / "a" / "samples" / "arithmetic_T1.parquet").to_pylist()
    assert len(samples) == 12
    accuracy = sum(s["correct"] for s in samples) / 12
    assert report["table1"]["avg@k"]["a"]["arithmetic"][0] == pytest.approx(accuracy)
    assert report["samples"]["a"]["own"]["0"]["without_gold"] == 1

    recipe("evaluate", *options, "--output_dir", "b", "--seed", "1")
    without_limit = ("--model", tiny.MODEL_PATH, "--benchmark", own, "--temperatures", "0", "--max_new_tokens", "48")
    recipe("evaluate", *without_limit, "--output_dir", "c", "--no_figures")
    assert pq.read_table(tmp_path / "c" / "samples" / "own_T0.parquet").num_rows == 1
    recipe("evaluate", "--compare", "Base=a", "ERPO=b", "--output_dir", "both")
    assert "## Differences to Base" in (tmp_path / "both" / "report.md").read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "one of --model, --checkpoints and --compare"),
        (("--model", "m"), "Give --benchmarks"),
        (("--model", "m", "--benchmarks", "amc", "--backend", "openai"), "--base_url go together"),
        (("--model", "m", "--benchmarks", "amc", "--k", "0"), "k >= 1"),
        (("--compare", "a"), "--output_dir"),
        (("--model", "m", "--benchmarks", "amc", "--limit", "0"), "--limit must be at least 1"),
        (("--checkpoints", "nowhere", "--benchmarks", "arithmetic"), "No checkpoint-<step> in nowhere"),
    ],
)
def test_wrong_options(recipe, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        recipe("evaluate", *arguments)


def test_checkpoints_and_consistency(recipe, tmp_path, capsys):
    log = [{"step": s, "reward": 0.5, TRAIN_ACCURACY: s / 100} for s in (1, 2)]
    for step in (1, 2):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        shutil.copytree(tiny.MODEL_PATH, folder)
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": log[:step]}))
    recipe(
        "evaluate", "--checkpoints", "run", *SMALL, "--temperatures", "1.0", "--output_dir", "evals", "--no_figures"
    )
    recipe("plot_runs", "checkpoints", "ERPO=evals", "--output", "c.png")
    recipe("plot_runs", "training", "ERPO=run", "--output", "t.png")
    assert (tmp_path / "c.png").exists() and (tmp_path / "t.png").exists()
    capsys.readouterr()
    recipe("plot_runs", "consistency", "--method", "ERPO", "run", "A=evals", "--window", "1")
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| Train")]
    assert [cell.strip() for cell in rows[0][2:-1]] == ["1.00", "2.00", "1.50"]


def test_nll_correlation(recipe, tmp_path):
    options = ("--model", tiny.MODEL_PATH, "--questions", "arithmetic", "--limit", "12", "--max_new_tokens", "32")
    recipe("nll_correlation", *options, "--output_dir", "out")
    table = pq.read_table(tmp_path / "out" / "nll.parquet")
    assert table.num_rows == 12 and min(table["prompt_nll"].to_pylist()) > 0
    assert json.loads((tmp_path / "out" / "correlation.json").read_text())["questions"] == 12
