"""The embedded default: a small arithmetic reasoner and its questions, so that a fresh machine can train offline."""

import itertools
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from datasets import Dataset

MODEL_PATH = str(Path(__file__).parent / "model")
"""Folder of the embedded checkpoint, for `from_pretrained`; `erpo_trl/tiny/build.py` makes it."""

OPERATIONS = {"+": 0.5, "-": 0.3, "*": 0.2}  # operator -> its frequency
WORDINGS = {  # operator -> wording -> its frequency
    "+": {
        "What is {a} + {b}?": 0.7,
        "Compute {a} + {b}.": 0.2,
        "Tom has {a} apples and buys {b} more. How many apples does he have?": 0.1,
    },
    "-": {
        "What is {a} - {b}?": 0.7,
        "Compute {a} - {b}.": 0.2,
        "Tom has {a} apples and eats {b} of them. How many are left?": 0.1,
    },
    "*": {
        "What is {a} * {b}?": 0.7,
        "Compute {a} * {b}.": 0.2,
        "There are {a} boxes of {b} apples. How many apples is that?": 0.1,
    },
}
SPLITS = {"train": 4000, "test": 500}  # split -> rows


@cache
def problems(split: str) -> tuple[list[tuple[int, str, int]], list[float]]:
    """
    Every `(a, operator, b)` of a split, and their cumulative frequencies: Zipf-like in both operands.

    One problem in ten, chosen at random, is held out as `"test"`, whatever its wording; the pre-training of the
    embedded model keeps to `"train"` too.
    """
    everything = [(a, "+", b) for a, b in itertools.product(range(1, 100), repeat=2)]
    everything += [(a, "-", b) for a in range(1, 100) for b in range(1, a + 1)]
    everything += [(a, "*", b) for a in range(1, 100) for b in range(2, 10)]
    random.Random(0).shuffle(everything)
    cut = len(everything) // 10
    chosen = everything[:cut] if split == "test" else everything[cut:]
    weights = [1 / ((a + 1) * (b + 1)) for a, _, b in chosen]
    total = dict.fromkeys(OPERATIONS, 0.0)
    for (_, operator, _), weight in zip(chosen, weights, strict=True):
        total[operator] += weight
    shares = [
        OPERATIONS[operator] * weight / total[operator]
        for (_, operator, _), weight in zip(chosen, weights, strict=True)
    ]
    return chosen, list(itertools.accumulate(shares))


def draw(split: str, count: int, rng: random.Random) -> list[tuple[int, str, int, str]]:
    """`count` rows `(a, operator, b, question)` drawn, with replacement, at the frequencies of the split."""
    chosen, cumulative = problems(split)
    rows = []
    for a, operator, b in rng.choices(chosen, cum_weights=cumulative, k=count):
        wordings = WORDINGS[operator]
        wording = rng.choices(list(wordings), list(wordings.values()))[0]
        rows.append((a, operator, b, wording.format(a=a, b=b)))
    return rows


def solve(a: int, operator: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def load_arithmetic(split: str) -> "Dataset":
    """
    Arithmetic questions with their answers, made on the spot: deterministic, no download.

    Args:
        split (`str`):
            `"train"` (4000 rows at the frequencies of `problems`, so common questions repeat) or `"test"` (500
            distinct questions about problems that are not in `"train"`, nor in the embedded model's pre-training).

    Returns:
        `datasets.Dataset` with string columns `question` and `answer` (an integer in decimal).

    Raises:
        ValueError: for any other `split`.
    """
    from datasets import Dataset

    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {', '.join(map(repr, SPLITS))}, got {split!r}.")
    rng = random.Random(split)
    rows = draw(split, SPLITS[split] if split == "train" else 4 * SPLITS[split], rng)
    if split == "test":
        rows = list(dict.fromkeys(rows))[: SPLITS[split]]
    return Dataset.from_dict({"question": [row[3] for row in rows], "answer": [str(solve(*row[:3])) for row in rows]})
