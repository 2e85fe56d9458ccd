r"""Completions graded per second: `accuracy_reward` against a plain loop over math-verify in one process.

    python benchmarks/rewards.py [--completions 4096] [--workers 2] [--loop 512]

The batch is what a rollout hands over: prompts × 8 completions of a page of reasoning that ends in a box; about half
are right, many of them written otherwise than the gold. The second batch has 1 % pathological answers, all different:
towers of powers, large factorials, deep nesting, long sums, megabytes. To reach: no slower than the loop per core, and
the pathological batch at most twice the time of the clean one.
"""

import argparse
import os
import random
import time

from erpo_trl import rewards


REASONING = (
    "Let us look at the problem step by step. We set $f(x) = {a}x^2 - {b}x + {c}$ and note that $f(1) = {d}$, so that "
    r"the sum of the roots is $\frac{{{b}}}{{{a}}}$. Completing the square, \[ {a}\left(x-\frac{{{b}}}{{{d}}}\right)^2"
    r" = {c}, \] hence there are two cases. "
)


def problem(rng: random.Random) -> tuple[str, list[str], list[str]]:
    """A gold, ways to write it, and wrong answers, in the shapes of MATH."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 30)
    return rng.choice(
        [
            (
                f"{a * b}",
                [f"{a * b}", f"x = {a * b}", rf"{a * b}^\circ"],
                [f"{a * b + 1}", f"{a}", rf"\frac{{{a}}}{{{b}}}"],
            ),
            (f"{a * b}", [f"{a * b}"], [f"{a * b - c}", f"{b}"]),
            (
                rf"\frac{{{a}}}{{{b}}}",
                [rf"\frac{{{a}}}{{{b}}}", rf"\dfrac{{{a * c}}}{{{b * c}}}", f"{a}/{b}"],
                [f"{a / b:.3f}", f"{c}"],
            ),
            (rf"{a}\sqrt{{{b}}}", [rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{b}}}\cdot {a}"], [rf"{b}\sqrt{{{a}}}", f"{a}"]),
            (
                rf"\frac{{{a}\pi}}{{{b}}}",
                [rf"\frac{{{a}}}{{{b}}}\pi", rf"\frac{{{a}\pi}}{{{b}}}"],
                [rf"{a}\pi", r"\frac{\pi}{2}"],
            ),
            (f"({a},{b})", [rf"\left({a}, {b}\right)", f"({a},{b})"], [f"({b},{a})", f"({a},{c})"]),
            (f"{a},-{b}", [f"-{b}, {a}", f"x = {a}, x = -{b}"], [f"{a}", f"{a}, {b}"]),
            (rf"[{a},\infty)", [rf"x \ge {a}", rf"[{a},\infty)"], [rf"({a},\infty)", rf"x \le {a}"]),
            (f"{a}x^2+{b}x+{c}", [f"{c}+{b}x+{a}x^2", f"{a}x^2+{b}x+{c}"], [f"{a}x^2-{b}x+{c}", f"{a}x+{b}"]),
            (rf"{a}\%", [f"{a}", rf"{a}\%"], [f"{b + 100}", rf"{c}.5\%"]),
            (
                rf"\begin{{pmatrix}}{a}\\{b}\end{{pmatrix}}",
                [rf"\begin{{bmatrix}} {a} \\ {b} \end{{bmatrix}}"],
                [f"({a},{b})"],
            ),
            (r"\text{Friday}", ["Friday", r"\text{Friday}"], [r"\text{Monday}", "5"]),
        ]
    )


def pathological(n: int) -> str:
    """The n-th of a family of answers on which a computer-algebra system hangs or swells."""
    return [
        f"10^{{10^{{{10 + n}}}}}",
        f"({10 + n}^9)!",
        f"9^{{9^{{9^{{{9 + n}}}}}}}",
        "(" * (9 + n) + "x+1" + ")^{99}" * (9 + n),
        rf"\sum_{{k=1}}^{{10^{{{9 + n}}}}}\frac{{1}}{{k^{{3}}}}",
        rf"(x+{n})^{{10^{{7}}}}",
        r"\sqrt{2+" * (40 + n) + "2" + "}" * (40 + n),
        f"{n}" + "9" * 1_000_000,
        rf"\sin(10^{{10^{{{10 + n}}}}})",
        rf"\binom{{10^{{{9 + n}}}}}{{10^{{8}}}}",
    ][n % 10]


def make_batch(size: int, share_pathological: float, seed: int = 0) -> tuple[list[str], list[str]]:
    rng = random.Random(seed)
    completions, golds = [], []
    while len(golds) < size:
        gold, right, wrong = problem(rng)
        for _ in range(min(8, size - len(golds))):
            steps = "".join(
                REASONING.format(a=rng.randint(2, 9), b=rng.randint(2, 9), c=2, d=3) for _ in range(rng.randint(3, 9))
            )
            answer = rng.choice(right if rng.random() < 0.5 else wrong)
            completions.append(rf"<think>{steps}</think> Therefore the answer is $\boxed{{{answer}}}$.")
            golds.append(gold)
    for n, row in enumerate(rng.sample(range(size), int(size * share_pathological))):
        completions[row] = rf"Therefore the answer is $\boxed{{{pathological(n)}}}$."
    return completions, golds


def plain_loop(completions: list[str], golds: list[str]) -> list[float]:
    from math_verify import parse, verify

    return [
        float(verify(parse(rf"\boxed{{{gold}}}"), parse(text))) for text, gold in zip(completions, golds, strict=True)
    ]


def per_second(grade, completions: list[str], golds: list[str]) -> tuple[float, list[float]]:
    start = time.perf_counter()
    graded = grade(completions, golds)
    return len(golds) / (time.perf_counter() - start), graded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--completions", type=int, default=4096)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--loop", type=int, default=512, help="completions given to the plain loop (it is slow)")
    args = parser.parse_args()
    os.environ[rewards.WORKERS_VARIABLE] = str(args.workers)

    # another seed: the parsers of the workers remember what they have read
    clean, hard = make_batch(args.completions, 0.0), make_batch(args.completions, 0.01, seed=1)
    plain_loop([r"\boxed{\frac{1}{2}}"], ["0.5"])
    rewards.verify_batch([(f"{n}/3", "1/2") for n in range(4 * args.workers)])  # start the workers

    loop, by_loop = per_second(plain_loop, *(column[: args.loop] for column in clean))
    ours, graded = per_second(rewards.accuracy_reward, *clean)
    ours_hard, _ = per_second(rewards.accuracy_reward, *hard)
    rows = [
        ("math-verify, plain loop, clean", 1, loop, 1.0),
        ("accuracy_reward, clean", args.workers, ours, ours / args.workers / loop),
        ("accuracy_reward, 1 % pathological", args.workers, ours_hard, ours_hard / args.workers / loop),
    ]
    print(f"{'':36}{'cores':>6}{'per second':>12}{'per core, loop = 1':>20}")
    for name, cores, rate, ratio in rows:
        print(f"{name:36}{cores:>6}{rate:>12.0f}{ratio:>20.2f}")
    print(f"pathological batch: {ours / ours_hard:.2f} × the time of the clean one")
    differ = sum(x != y for x, y in zip(by_loop, graded, strict=False))
    print(f"verdicts that differ from the plain loop's: {differ} of {args.loop}")


if __name__ == "__main__":
    main()
