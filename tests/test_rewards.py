"""Verdicts on every kind of answer, what hostile text can do (nothing), and what TRL is handed back."""

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from erpo_trl import _verifier, rewards
from erpo_trl.rewards import accuracy_reward, format_reward, last_boxed, verify, verify_batch


DATA = Path(__file__).parent / "data"
SLOW = r"\int_0^1\int_0^1 x^{y^x}\sin(y^{x^y})\,dx\,dy"  # minutes of quadrature
MACHINE = 1.5  # seconds of other work on a crowded machine


def read_lines(name: str) -> list[str]:
    return (DATA / name).read_text(encoding="utf-8").splitlines()


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in read_lines(name)]


@pytest.fixture(autouse=True, scope="module")
def workers():
    verify("1/2", "0.5")  # so that no test measures the start
    yield
    rewards.shutdown()


# --------------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize("case", rows("math_verdicts.jsonl"), ids=lambda case: case["why"])
def test_shared_verdicts(case):
    assert accuracy_reward([case["completion"]], [case["gold"]]) == [float(case["correct"])]
    message = [{"role": "assistant", "content": case["completion"]}]
    assert accuracy_reward([message], [rf"Therefore \boxed{{{case['gold']}}}."]) == [float(case["correct"])]


@pytest.mark.parametrize("kind", sorted({row["kind"] for row in rows("math_kinds.jsonl")}))
def test_verdicts_by_kind(kind):
    cases = [row for row in rows("math_kinds.jsonl") if row["kind"] == kind]
    got = accuracy_reward(
        [rf"So \boxed{{{c['answer']}}}." for c in cases if _boxes(c)], [c["gold"] for c in cases if _boxes(c)]
    )
    wrong = [c for c, reward in zip(filter(_boxes, cases), got, strict=True) if reward != float(c["correct"])]
    assert not wrong


def _boxes(case: dict) -> bool:
    return last_boxed(rf"\boxed{{{case['answer']}}}") == case["answer"]


def test_every_gold_equals_itself():
    golds = read_lines("golds.txt")
    assert len(set(golds)) >= 200
    completions = [rf"<think>hm</think> The answer is $\boxed{{{gold}}}$." for gold in golds]
    rewarded = accuracy_reward(completions, golds)
    assert [gold for gold, reward in zip(golds, rewarded, strict=True) if reward != 1.0] == []


def test_every_gold_equals_itself_in_another_hand():
    def retyped(gold):
        gold = re.sub(r"\\d?frac(?=\s*\{)", r"\\tfrac", gold).replace(r"\left", "").replace(r"\right", "")
        return (
            rf"$\displaystyle {gold} $."
            if re.search(r"\d(,|\{,\})\d{3}", gold)
            else "$ " + re.sub(r"(?<!\\)([,=+<>&])", r" \1 ", gold)
        )

    golds = read_lines("golds.txt")
    verdicts = verify_batch([(retyped(gold), gold) for gold in golds])
    assert [gold for gold, verdict in zip(golds, verdicts, strict=True) if verdict is not True] == []


def test_different_golds_differ():
    """No gold equals its neighbour in the table, apart from the few that are one value written twice."""
    golds = read_lines("golds.txt")
    pairs = list(zip(golds, golds[1:], strict=False))
    equal = [pair for pair, verdict in zip(pairs, verify_batch(pairs), strict=True) if verdict]
    assert equal == [
        (r"\frac{\ln 3}{\ln 2}", r"\log_2 3"),
        ("1,-2", "-2,1"),
        (r"6\text{:}00 \text{ p.m.}", "6:00 PM"),
    ]


@pytest.mark.parametrize(
    "gold", ["", " ", r"\frac{1}{", r"\boxed{}", "???", "Answer is forty two.", r"\frac{}{}", "}{", "$$"]
)
def test_unparseable_gold_skips_the_row(gold):
    assert accuracy_reward([r"\boxed{4}", r"\boxed{4}", "none"], [gold, "4", gold]) == [None, 1.0, None]


@pytest.mark.parametrize(
    "text", ["", "4", r"\boxed{}", r"\boxed{ }", r"\boxed{4", r"\boxed{\frac{4}{1}", r"\boxed{\frac{4}}"]
)
def test_missing_or_unparseable_answer_is_wrong(text):
    assert accuracy_reward([text], ["4"]) == [0.0]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 completions but 1 golds"):
        accuracy_reward(["a", "b"], ["1"])


def test_completions_table():
    columns = {}
    accuracy_reward([r"\boxed{3}", "none"], ["3", r"so \boxed{4}"], log_extra=columns.__setitem__, prompts=["p", "q"])
    assert columns == {"answer": ["3", ""], "gold": ["3", "4"]}


# ------------------------------------------------------------------------------------------------------------ boxes


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{3} no, \boxed{4}", "4"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{4} and then \boxed{5", "4"),
        (r"\boxed{3 and then \boxed{4}", "4"),
        (r"\boxed{x = \boxed{4}}", r"x = \boxed{4}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\boxed {7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed 12 apples", "12"),
        (r"an { open brace, \boxed{7}}}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed", None),
        ("boxed{4}", None),
        ("", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize("unit", [r"\boxed{", "{", "}", r"\boxed{1}", "\\", r"\boxed", r"\boxed{{}", " ", "a"])
def test_last_boxed_takes_linear_time(unit):
    start = time.perf_counter()
    last_boxed(r"\boxed{7}" + unit * (2_000_000 // len(unit)))
    assert time.perf_counter() - start < 2 * MACHINE


# ----------------------------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("completion", "prompt", "reward"),
    [
        (r"<think>a</think> so \boxed{4}", "q", 1),
        ("\n<think>\na\n</think>\n\n" + r"\boxed{\frac{1}{2}}", "q", 1),
        (r"a</think> so \boxed{4}", "q", 1),  # prefilled by the template, which the prompt column does not show
        (r"a</think> so \boxed{4}", "q <think>\n", 1),
        (r"<think>a</think> so \boxed{4}", "q <think>\n", 0),
        (r"so \boxed{4}", "q", 0),
        (r"<think>a so \boxed{4}", "q", 0),
        (r"<think>a</think> so 4", "q", 0),
        (r"<think>\boxed{4}</think> so 4", "q", 0),
        (r"<think>a</think> \boxed{}", "q", 0),
        (r"<think>a</think> \boxed{4", "q", 0),
        (r"<think>a</think> b</think> \boxed{4}", "q", 0),
        (r"<think>a<think>b</think> \boxed{4}", "q", 0),
        (r"well <think>a</think> \boxed{4}", "q", 0),
        (r"<think>a</think> <think> \boxed{4}", "q", 0),
        (r"\boxed{4} <think>a</think>", "q", 0),
        ("", "q", 0),
    ],
)
def test_format(completion, prompt, reward):
    assert format_reward([completion], prompts=[prompt]) == [reward]
    conversation = [[{"role": "user", "content": prompt}]]
    assert format_reward([[{"role": "assistant", "content": completion}]], prompts=conversation, step=1) == [reward]


# --------------------------------------------------------------------------------------------------------- deadline


def test_deadline_holds_and_stalls_nobody():
    easy = [(rf"\frac{{{n}}}{{7}}", rf"\frac{{{2 * n}}}{{14}}") for n in range(40)]
    start = time.perf_counter()
    verdicts = verify_batch([easy[0], (SLOW, "3"), *easy[1:]], deadline=1.0)
    assert time.perf_counter() - start < 1.0 + 2 * MACHINE
    assert verdicts == [True, False] + [True] * 39
    assert verify("2/4", "1/2") is True  # the worker that was killed is back


def test_deadline_holds_in_threads():
    results, start = {}, time.perf_counter()

    def grade(name, pairs):
        results[name] = verify_batch(pairs, deadline=1.0)

    threads = [threading.Thread(target=grade, args=(0, [(SLOW, "3"), (r"10^{10^{10}}", "3")]))]
    threads += [
        threading.Thread(target=grade, args=(n, [("1/2", f"{n}/{2 * n}"), ("1/3", "1/2")])) for n in range(1, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == {0: [False, False], **{n: [True, False] for n in range(1, 6)}}
    assert time.perf_counter() - start < 1.0 + 2 * MACHINE


def test_a_gold_that_takes_too_long_skips_the_row():
    endless = "1+" * 900 + "1"  # seconds in the parser
    assert verify("4", endless, deadline=0.05) is None


def test_equal_pairs_are_graded_once(monkeypatch):
    asked = []
    ask = rewards._Worker.ask
    monkeypatch.setattr(rewards._Worker, "ask", lambda self, *args: asked.append(args) or ask(self, *args))
    assert verify_batch([("1/2", "0.5")] * 50 + [("7", "7"), ("7", "8")]) == [True] * 51 + [False]
    assert len(asked) == 1


def test_plain_integers_need_no_worker(monkeypatch):
    monkeypatch.setattr(rewards, "_get_pool", None)
    assert accuracy_reward([r"\boxed{4}", r"\boxed{ -12 }", r"\boxed{5}"], ["4", "-12", "4"]) == [1.0, 1.0, 0.0]


# ---------------------------------------------------------------------------------------------------------- hostile

PIECES = [
    *(r"\frac", r"\sqrt", r"\pi", r"\infty", r"\le", r"\cup", r"\pm", r"\text{", r"\sum_{k=1}^{", r"\int_0^", r"\log"),
    *(r"\sin", r"\binom", r"\prod", r"\boxed{", r"\lim_{x\to0}", r"\begin{pmatrix}", r"\end{pmatrix}", r"\{", r"\}"),
    *(r"\%", r"\\", "10", "999999999", "__import__(", " "),
    *"{}()[]^_12xyn!,;=<&|\\$%.+-*/'\"−√½²\x00\ud800",
]


def hostile_strings(number: int, seed: int) -> list[str]:
    rng, real = random.Random(seed), read_lines("golds.txt") + [row["answer"] for row in rows("math_kinds.jsonl")]

    def mutated():
        text = list(rng.choice(real))
        for _ in range(rng.randint(1, 4)):
            i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
            text[i:j] = rng.choice([[], [rng.choice(PIECES)], text[i:j] * 2])
        return "".join(text)

    return [
        mutated() if rng.random() < 0.5 else "".join(rng.choices(PIECES, k=rng.randint(1, 30))) for _ in range(number)
    ]


@pytest.mark.parametrize("number", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_and_mutated_latex(number):
    golds = random.Random(1).choices(read_lines("golds.txt"), k=number)
    texts = hostile_strings(number, seed=number)
    verdicts = verify_batch(list(zip(texts, golds, strict=True)))
    assert set(verdicts) <= {True, False} and verdicts.count(True) < number / 20
    assert set(verify_batch(list(zip(golds[: number // 4], texts, strict=False)))) <= {True, False, None}
    assert verify("1/2", "0.5") is True


def test_deep_nesting_and_megabytes():
    deep = [
        left * n + "1" + right * n
        for left, right in [
            ("{", "}"),
            ("(", ")"),
            (r"\frac{1}{", "}"),
            (r"\sqrt{", "}"),
            (r"\left(1+", r"\right)"),
            ("x^{", "}"),
        ]
        for n in (10, 100, 10_000)
    ]
    long = [
        unit * (1_000_000 // len(unit)) for unit in ("9", "1+", r"\frac", "{", "x ", "\\", "½", r"\text{a}", "1,000,")
    ]
    texts = [rf"\boxed{{{text}}}" for text in deep + long] + long
    start = time.perf_counter()
    assert set(accuracy_reward(texts, ["3"] * len(texts))) == {0.0}
    assert time.perf_counter() - start < rewards.DEADLINE * len(deep) / 2


def test_numbers_too_large_to_work_out_are_told_apart_at_once():
    towers = [
        r"10^{10^{10}}",
        r"9^{9^{9^{9}}}",
        r"(10^9)!",
        r"((5!)!)!",
        r"2^{2^{2^{2^{2^{2}}}}}",
        r"\binom{10^{12}}{10^{9}}",
    ]
    towers += [r"\sum_{k=1}^{10^{12}}\frac{1}{k}", r"\prod_{k=1}^{10^{9}} k", r"(x+1)^{10^{9}}", "9" * 1900]
    start = time.perf_counter()
    assert verify_batch([(tower, "3") for tower in towers]) == [False] * len(towers)
    assert verify_batch([(tower, tower) for tower in towers]) == [True] * len(towers)
    assert time.perf_counter() - start < len(towers) * rewards.DEADLINE / 2


def test_memory_is_bounded():
    verify_batch([(rf"\prod_{{k=1}}^{{{9 * 10**6 + n}}} k^{{k}}+{n}x^{{99999}}", f"{n}x") for n in range(6)])
    for worker in rewards._get_pool().workers:
        if worker.process is not None:
            limits = Path(f"/proc/{worker.process.pid}/limits").read_text()
            assert int(re.search(r"Max address space +(\d+)", limits)[1]) == rewards._MEMORY_BYTES


def test_nothing_is_evaluated(tmp_path):
    mark = tmp_path / "mark"
    command = f"open('{mark}','w')"
    codes = [
        f"__import__('os').system('touch {mark}')",
        command,
        f"eval({command!r})",
        rf"\text{{{command}}}",
        f"1+{command}",
        f"$(touch {mark})",
        f"`touch {mark}`",
        f"lambda: {command}",
        f"[x for x in [{command}]]",
        rf"\input{{|touch {mark}}}",
        rf"\write18{{touch {mark}}}",
        f"sympify('{command}')",
    ]
    verdicts = verify_batch(
        [(code, gold) for code in codes for gold in ("1", r"\frac{1}{2}", "x", "(1,2)", r"\text{a}")]
    )
    assert set(verdicts) == {False}
    verify_batch([("1", code) for code in codes])
    assert not mark.exists()


# ------------------------------------------------------------------------------------------------------- processes


def run_python(code: str, **variables) -> str:
    root = str(Path(_verifier.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": root, **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True
    ).stdout


def test_import_is_light_and_workers_end_with_the_interpreter():
    out = run_python(
        "import sys\n"
        "from erpo_trl import rewards\n"
        "print(not {'torch', 'trl', 'sympy', 'math_verify'} & set(sys.modules), rewards._pool)\n"
        "print(rewards.verify('1/2', '0.5'), *[w.process.pid for w in rewards._pool.workers if w.process])\n",
        ERPO_REWARD_WORKERS="2",
    ).split()
    assert out[:3] == ["True", "None", "True"]
    time.sleep(0.2)
    assert out[3:] and not any(Path(f"/proc/{pid}").exists() for pid in out[3:])


def test_a_forked_child_has_its_own_workers():
    out = run_python(
        "import os, sys\n"
        "from erpo_trl import rewards\n"
        "print(rewards.verify('1/2', '0.5'), flush=True)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(rewards.verify('1/4', '0.25'), flush=True)\n"
        "    rewards.shutdown()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "print(rewards.verify('1/8', '0.125'))\n",
        ERPO_REWARD_WORKERS="1",
    )
    assert out.split() == ["True", "True", "True"]


def test_workers_are_fresh_interpreters(tmp_path):
    """The caller's script is not imported again, nor torch."""
    script = tmp_path / "train.py"
    script.write_text(
        "print('script runs')\n"
        "import torch, pathlib\n"
        "from erpo_trl import rewards\n"
        "print(rewards.verify('1/2', '0.5'))\n"
        "pid = next(w.process.pid for w in rewards._pool.workers if w.process)\n"
        "print('libtorch' in pathlib.Path(f'/proc/{pid}/maps').read_text())\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(_verifier.__file__).parents[1])}
    out = subprocess.run(
        [sys.executable, script], env=env, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    assert out.splitlines() == ["script runs", "True", "False"]


def test_number_of_workers(monkeypatch):
    monkeypatch.setenv(rewards.WORKERS_VARIABLE, "3")
    assert rewards._default_workers() == 3
    monkeypatch.setenv(rewards.WORKERS_VARIABLE, "none")
    with pytest.raises(ValueError, match="ERPO_REWARD_WORKERS='none': expected a positive integer"):
        rewards._default_workers()
    monkeypatch.delenv(rewards.WORKERS_VARIABLE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(200)))
    assert rewards._default_workers() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "50")
    assert rewards._default_workers() == 4


@pytest.mark.parametrize("code", [*range(32), 0x7F, 0x85, 0xA0, 0x2028, 0x3000, 0xFEFF])
def test_control_characters_around_an_integer(code):
    """`str.strip` and `int` disagree about what surrounds a number."""
    assert verify(f"{chr(code)}7", "7") in (True, False)
    assert verify(f"7{chr(code)}", "8") is False
