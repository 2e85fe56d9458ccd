"""The benchmarks run, at toy size, and print whole tables. What they measure is not judged here."""

import importlib
import math
from pathlib import Path

import pytest


TOY = ["--hidden_size", "64", "--layers", "1", "--vocab_size", "500", "--device", "cpu"]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module


def assert_printed(rows, printed):
    lines = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 2
    assert len({len(line) for line in lines}) == 1
    for line, row in zip(lines[2:], rows, strict=True):
        assert [cell.strip() for cell in line.strip("|").split("|")][0] == row[""]
    for row in rows:
        for value in row.values():
            assert isinstance(value, str) or (math.isfinite(value) and value > 0)


@pytest.mark.parametrize("extra", [[], pytest.param(["--compact_head"], marks=pytest.mark.slow)])
def test_step_overhead(script, capsys, extra):
    options = ["--prompt_tokens", "24", "--template_tokens", "4", "--completion_tokens", "3", "--rounds", "1"]
    rows = script("step_overhead").main([*TOY, *options, *extra])
    assert_printed(rows, capsys.readouterr().out)
    assert [row[""] for row in rows] == [
        f"{quantity}, {phase} ({unit})"
        for quantity, unit in (("time", "s"), ("memory", "MB"))
        for phase in ("loss + backward", "all but generation", "whole step")
    ]
    assert list(rows[0]) == ["", "GRPO", "ERPO", "GRPO β=0.01", "ERPO / GRPO", "ERPO / GRPO β=0.01", "target"]
    for method in ("GRPO", "ERPO", "GRPO β=0.01"):
        loss, no_generation, whole = (row[method] for row in rows[:3])
        assert loss < no_generation < whole


def test_scoring(script, capsys):
    rows = script("scoring").main([*TOY, "--rows", "6", "--max_tokens", "32", "--rounds", "2"])
    printed = capsys.readouterr().out
    assert_printed(rows, printed)
    assert [row[""] for row in rows] == ["loop", "score_queries", "bare forward"]
    assert rows[1]["score_queries: speed"] == rows[1]["score_queries: memory"] == 1
    difference = float(printed.split("from the loop's: ")[1].split()[0])
    assert difference < 1e-3
