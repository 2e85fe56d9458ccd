"""The benchmark of scale runs, at toy size, and memory stays bounded. Its times are not judged here."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("scale")


def test_linear_fit(script):
    assert script.linear_fit([1, 2, 4], [5, 7, 11]) == pytest.approx((2, 3, 1))
    assert script.linear_fit([0, 1, 2], [0, 2, 1])[2] == pytest.approx(0.25)


def test_fits_are_printed(script, capsys):
    sizes = [(1000, 30_000), (2000, 60_000), (4000, 120_000)]
    script.print_fits(
        [
            {"rows": rows, "tokens": tokens, "cpu_seconds": 2e-5 * tokens + 1, "above": 3000 * rows + 10**8}
            for rows, tokens in sizes
        ]
    )
    assert capsys.readouterr().out.splitlines() == [
        "CPU time = 20.00 µs × tokens +1.00 s (R² = 1.00000)",
        "memory = 3000 bytes × rows (100 a token) +100 MB (R² = 1.00000)",
    ]


@pytest.mark.slow
def test_scale(script, capsys):
    rows = [2000, 4000]
    results = script.main(["--rows", *map(str, rows), "--hidden_size", "32", "--layers", "1", "--vocab_size", "200"])
    assert [result["rows"] for result in results] == rows
    assert 1.8 < results[1]["tokens"] / results[0]["tokens"] < 2.2
    # A batch's activations and what the heap keeps of them, and 10 kB a row for its token ids, key and scores
    for result in results:
        assert 0 < result["above"] < 250e6 + 10e3 * result["rows"]
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == len(rows) + 2
