"""The metrics against exact enumeration and hand-computed cases."""

from itertools import combinations, product

import numpy as np
import pytest

from erpo_trl.evaluation import metrics


def samples(verdicts, answers=None, **extra):
    answers = answers or ["a" if v else "b" for v in verdicts]
    base = {"question": 0, "format": 1.0, "tokens": 4, "truncated": False}
    return [
        base | {"sample": i, "correct": v, "answer": a} | extra
        for i, (v, a) in enumerate(zip(verdicts, answers, strict=True))
    ]


def test_pass_at_k_is_the_enumerated_chance():
    for n in range(1, 8):
        for c in range(n + 1):
            verdicts = [1] * c + [0] * (n - c)
            for k in range(1, n + 1):
                draws = [max(draw) for draw in combinations(verdicts, k)]
                assert metrics.pass_at_k(n, c, k) == pytest.approx(np.mean(draws), abs=1e-15)


def test_pass_at_k_is_exact_where_floats_would_not_be():
    assert metrics.pass_at_k(10_000, 1, 5_000) == 0.5
    assert metrics.pass_at_k(32, 32, 32) == 1.0 and metrics.pass_at_k(32, 0, 1) == 0.0


@pytest.mark.parametrize("n, c, k", [(3, 1, 4), (0, 0, 1), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_pass_at_k_refuses(n, c, k):
    with pytest.raises(ValueError, match="pass@"):
        metrics.pass_at_k(n, c, k)


def test_majority():
    assert metrics.majority_at_k(["4", "5", "4"], [1, 0, 1]) == 1.0
    assert metrics.majority_at_k(["4", "5", "5"], [1, 0, 0]) == 0.0
    assert metrics.majority_at_k(["4", "5"], [1, 0]) == 0.5
    assert metrics.majority_at_k(["4", None, None], [1, 0, 0]) == 1.0
    assert metrics.majority_at_k([None, None], [0, 0]) == 0.0


def test_question_metrics_by_hand():
    rows = samples([0.0, 1.0, 1.0, 0.0], ["7", "4", "4", None])
    rows[3] |= {"format": 0.0, "tokens": 12, "truncated": True}
    expected = {
        "avg@k": 0.5,
        "pass@k": 1 - 1 / 6,  # 2 of 4, of which one pair of six is both wrong
        "pass@1": 0.0,
        "majority@k": 1.0,
        "format": 0.75,
        "tokens": 6.0,
        "truncated": 0.25,
    }
    assert metrics.question_metrics(rows[::-1], k=2) == pytest.approx(expected)
    with pytest.raises(ValueError, match="n = 4"):
        metrics.question_metrics(rows, k=5)


@pytest.mark.parametrize("verdict", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 3])
def test_all_right_all_wrong_and_k_1(verdict, k):
    rows = [row | {"question": q} for q in range(4) for row in samples([verdict] * k)]
    summary = metrics.summarize(rows)
    for metric in ("avg@k", "pass@k", "pass@1", "majority@k"):
        assert summary[metric] == verdict and summary[f"{metric}_interval"] == [verdict, verdict]


def test_ungraded_questions_are_counted_and_left_out():
    rows = samples([1.0]) + samples([None], ["x"], question=1, truncated=True) + samples([0.0], question=2)
    summary = metrics.summarize(rows)
    assert (summary["questions"], summary["ungraded"], summary["samples_truncated"]) == (2, 1, 1)
    assert summary["avg@k"] == 0.5
    with pytest.raises(ValueError, match="No question"):
        metrics.summarize(samples([None]))


def test_bootstrap_is_the_enumerated_distribution():
    values = [0.0, 0.25, 0.5, 1.0]
    means = [np.mean(draw) for draw in product(values, repeat=4)]  # all 256 equally likely resamples
    low, high = metrics.bootstrap_interval(values, confidence=0.8, resamples=40_000)
    assert (low, high) == pytest.approx(tuple(np.percentile(means, [10, 90])), abs=0.02)
    assert metrics.bootstrap_interval(values) == metrics.bootstrap_interval(values)  # seeded
    assert np.isnan(metrics.bootstrap_interval([0.5])).all()


def test_bootstrap_resamples_benchmarks_separately():
    a, b = [0.0, 1.0], [0.0, 0.0, 1.0]
    means = [(np.mean(x) + np.mean(y)) / 2 for x in product(a, repeat=2) for y in product(b, repeat=3)]
    interval = metrics.bootstrap_interval(a, b, confidence=0.7, resamples=40_000)
    assert interval == pytest.approx(tuple(np.percentile(means, [15, 85])), abs=0.02)


def test_bootstrap_covers_the_truth():
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        low, high = metrics.bootstrap_interval(rng.binomial(1, 0.4, size=60), resamples=500)
        hits += low <= 0.4 <= high
    assert 0.90 <= hits / 300 <= 0.98


def test_paired_difference_is_narrower_than_unpaired():
    rng = np.random.default_rng(0)
    hard = rng.random(50)
    a, b = dict(enumerate(hard)), dict(enumerate(hard + 0.1))
    assert metrics.paired_difference([a], [b]) == pytest.approx((0.1, 0.1, 0.1))
    difference, low, high = metrics.paired_difference([a, {0: 0.0, 1: 0.0}], [b, {0: 1.0, 1: 0.0}])
    assert difference == pytest.approx(0.3) and low == pytest.approx(0.05) and high == pytest.approx(0.55)
    with pytest.raises(ValueError, match="first 49"):
        metrics.paired_difference([a], [{q: v for q, v in b.items() if q < 49}])


def test_bands():
    assert metrics.band_temperatures([0.0, 0.1, 0.6, 1.0, 1.1, 1.5]) == {"≤ 1.0": [0.1, 0.6, 1.0], "1.2-1.5": [1.5]}
    assert metrics.band_temperatures([0.0, 1.5]) == {"1.2-1.5": [1.5]}
