"""
Metrics over graded samples (section 5 of arXiv 2608.23311): numbers in, numbers out.

A *sample* is a mapping with `question` (row of the benchmark), `sample` (0 … k-1), `correct` (1.0, 0.0, or `None`
when the gold can't be parsed), `format` (1.0 or 0.0), `tokens` (completion length), `truncated` (bool) and `answer`
(text of the last box, or `None`). A *cell* is all samples of one benchmark at one temperature.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import comb

import numpy as np


# What is reported per question, then averaged over questions.
METRICS = ("avg@k", "pass@k", "pass@1", "majority@k", "format", "tokens", "truncated")

# The paper's two means over temperatures (Tables 2 and 6), and greedy decoding in neither.
BANDS = {"≤ 1.0": (0.0, 1.0), "1.2-1.5": (1.2, 1.5)}


def pass_at_k(n: int, c: int, k: int) -> float:
    """
    Unbiased Pass@k, 1 - C(n-c, k) / C(n, k): the chance that k of the n samples, drawn without replacement, hold one
    of the c right ones.

    Args:
        n: Samples drawn.
        c: Right ones among them.
        k: Samples allowed.

    Raises:
        ValueError: if n < k, k < 1 or c is not in 0 … n.
    """
    if k < 1:
        raise ValueError(f"pass@k needs k >= 1, got k = {k}.")
    if n < k:
        raise ValueError(f"pass@{k} needs at least {k} samples per question, got n = {n}; sample more or lower k.")
    if not 0 <= c <= n:
        raise ValueError(f"pass@k needs 0 <= c <= n right samples, got c = {c} of n = {n}.")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def majority_at_k(answers: Sequence[str | None], correct: Sequence[float]) -> float:
    """
    Accuracy of the most frequent answer of one question; where several tie, the mean of their verdicts.

    Answers are compared as text, so that two spellings of one number are two candidates. A completion without an
    answer (`None`) does not vote; with no votes the question is wrong.

    Args:
        answers: One per sample.
        correct: Verdict of each, 1.0 or 0.0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    verdict = dict(zip(answers, correct, strict=True))
    most = max(votes.values())
    return float(np.mean([verdict[answer] for answer, count in votes.items() if count == most]))


def question_metrics(samples: Sequence[Mapping], k: int | None = None) -> dict[str, float]:
    """
    The `METRICS` of one question.

    `pass@1` is the verdict of the first sample alone, as the paper reports it next to Avg@k (this project's reading:
    the unbiased `pass_at_k(n, c, 1)` is Avg@k itself).

    Args:
        samples: All samples of the question, none of them ungraded.
        k: The k of `pass@k`; defaults to the number of samples.

    Raises:
        ValueError: if there are fewer than k samples.
    """
    samples = sorted(samples, key=lambda s: s["sample"])
    correct = [float(s["correct"]) for s in samples]
    return {
        "avg@k": float(np.mean(correct)),
        "pass@k": pass_at_k(len(samples), int(sum(correct)), k or len(samples)),
        "pass@1": correct[0],
        "majority@k": majority_at_k([s["answer"] for s in samples], correct),
        "format": float(np.mean([s["format"] for s in samples])),
        "tokens": float(np.mean([s["tokens"] for s in samples])),
        "truncated": float(np.mean([s["truncated"] for s in samples])),
    }


def cell_metrics(samples: Iterable[Mapping], k: int | None = None) -> dict[int, dict[str, float]]:
    """`question_metrics` of every gradable question of a cell, by question; ungraded questions are left out."""
    by_question = defaultdict(list)
    for sample in samples:
        by_question[sample["question"]].append(sample)
    return {
        question: question_metrics(rows, k)
        for question, rows in sorted(by_question.items())
        if all(row["correct"] is not None for row in rows)
    }


def summarize(samples: Sequence[Mapping], k: int | None = None) -> dict[str, float | int | list[float]]:
    """
    One cell in numbers: the mean over questions of each of `METRICS`, with `<metric>_interval`, its 95 % bootstrap
    interval; `questions` counted, `ungraded` questions left out, `samples_truncated` among all samples.

    Raises:
        ValueError: if no question could be graded.
    """
    table = cell_metrics(samples, k)
    if not table:
        raise ValueError(
            "No question of this benchmark has a gold answer that can be graded; check its answer column."
        )
    summary = {
        "questions": len(table),
        "ungraded": len({s["question"] for s in samples}) - len(table),
        "samples_truncated": sum(bool(s["truncated"]) for s in samples),
    }
    for metric in METRICS:
        values = [row[metric] for row in table.values()]
        summary[metric] = float(np.mean(values))
        summary[f"{metric}_interval"] = list(bootstrap_interval(values))
    return summary


def bootstrap_interval(
    *strata: Sequence[float], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over questions; for several benchmarks, of the mean of their means, the
    questions of each resampled separately. `(nan, nan)` when a benchmark has one question only: it says nothing about
    the spread. Where all values are equal the interval has no width.

    Args:
        strata: Per-question values, one sequence per benchmark.
        confidence: Probability covered.
        resamples: Bootstrap draws.
        seed: Of a generator of its own; the global random state is not touched.
    """
    strata = [np.asarray(values, dtype=float) for values in strata]
    if min(len(values) for values in strata) < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    draws = [values[rng.integers(len(values), size=(resamples, len(values)))].mean(axis=1) for values in strata]
    tail = 100 * (1 - confidence) / 2
    low, high = np.percentile(np.mean(draws, axis=0), [tail, 100 - tail])  # (resamples,) averaged over benchmarks
    return float(low), float(high)


def paired_difference(
    a: Sequence[Mapping[int, float]], b: Sequence[Mapping[int, float]], **bootstrap
) -> tuple[float, float, float]:
    """
    Mean difference b - a of two models on the same questions, with its bootstrap interval.

    Args:
        a, b: Per benchmark, the value of each question. Questions are matched by key.
        bootstrap: Passed on to `bootstrap_interval`.

    Returns:
        `(difference, low, high)`.

    Raises:
        ValueError: if the two don't cover the same benchmarks and questions.
    """
    if len(a) != len(b):
        raise ValueError(f"A paired difference needs the same benchmarks on both sides, got {len(a)} and {len(b)}.")
    strata = []
    for i, (left, right) in enumerate(zip(a, b, strict=True)):
        if left.keys() != right.keys():
            odd = sorted(left.keys() ^ right.keys())
            raise ValueError(
                f"A paired difference needs the same questions on both sides; in benchmark {i}, {len(odd)} are on one "
                f"side only, first {odd[0]}. Evaluate both models on the same benchmark."
            )
        strata.append([right[q] - left[q] for q in left])
    return (float(np.mean([np.mean(values) for values in strata])), *bootstrap_interval(*strata, **bootstrap))


def band_temperatures(temperatures: Iterable[float]) -> dict[str, list[float]]:
    """The temperatures that fall in each of the paper's two bands; greedy (0) in none, a band without any left out."""
    bands = {
        name: sorted(t for t in set(temperatures) if t > 0 and low <= t <= high) for name, (low, high) in BANDS.items()
    }
    return {name: inside for name, inside in bands.items() if inside}
