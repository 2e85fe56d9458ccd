r"""Rewards of the paper's math runs, as TRL calls them: `accuracy_reward` and `format_reward` (0.9 / 0.1 by default).

Answers are compared by math-verify's parser and the rules of `_verifier.py`, in worker processes: an answer that
takes longer than the deadline, or more memory than a worker has, is wrong, and nobody waits longer for it. This
works from any thread, next to CUDA and DDP (workers are fresh interpreters that import neither torch nor the caller's
`__main__`), and after a fork. Workers start with the first answer that needs one. POSIX only.

Importing this module imports neither torch, TRL nor sympy.
"""

import atexit
import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from . import _verifier


REWARD_WEIGHTS = [0.9, 0.1]  # accuracy, format: EasyR1's defaults, behind the paper's runs (erpo.md §5)
DEADLINE = 2.0  # seconds per answer
WORKERS_VARIABLE = "ERPO_REWARD_WORKERS"
_MAX_WORKERS = 16
_MEMORY_BYTES = 2 << 30  # address space of one worker; sympy and the parser take about 0.2 GiB of it
_START_SECONDS = 120.0  # for a worker to import sympy on a crowded machine

Completion = str | list[dict[str, str]]


# ---------------------------------------------------------------------------------------------------------- rewards


def accuracy_reward(
    completions: Sequence[Completion], solution: Sequence[str], log_extra=None, **kwargs
) -> list[float | None]:
    r"""1.0 where the last balanced `\boxed{}` of a completion is the gold, 0.0 where not, None where there is no gold.

    Args:
        completions: B completions as TRL passes them, plain text or conversations (the last message's content counts).
        solution: B golds (the dataset's `solution` column): answers, or texts whose last balanced `\boxed{}` counts.
        log_extra: given by the trainer; adds `answer` and `gold` columns to the completions table.

    Returns:
        B rewards. None (TRL skips the row) where the gold cannot be parsed; 0.0 where the answer is missing, cannot be
        parsed or was not graded within `DEADLINE` seconds.

    Raises:
        ValueError: as many golds as completions are needed.
    """
    if len(completions) != len(solution):
        raise ValueError(f"accuracy_reward: {len(completions)} completions but {len(solution)} golds in `solution`")
    answers = [last_boxed(_content(completion)) for completion in completions]
    golds = [_gold(text) for text in solution]
    verdicts = verify_batch(list(zip(answers, golds, strict=True)))
    if log_extra is not None:
        log_extra("answer", [answer or "" for answer in answers])
        log_extra("gold", golds)
    return [None if verdict is None else float(verdict) for verdict in verdicts]


def format_reward(completions: Sequence[Completion], prompts=None, **kwargs) -> list[float]:
    r"""1.0 where a completion is `<think>…</think> … \boxed{}` (the paper's Appendix A), else 0.0.

    One `</think>`, at most one `<think>`, which must come first, and a balanced, non-empty `\boxed{}` after the
    thinking. A chat template that ends the generation prompt with `<think>` leaves the completion without it, and the
    `prompts` TRL passes are the dataset's, before the template. So a completion without the opening tag counts as
    prefilled, and its text up to `</think>` as thinking: the only reading under which it makes sense. A prompt that
    itself ends with `<think>` must not be followed by a second one.

    Args:
        completions: B completions, plain text or conversations.
        prompts: B prompts as TRL passes them, or None.

    Returns:
        B rewards.
    """
    prompts = [""] * len(completions) if prompts is None else prompts
    return [
        float(_well_formed(_content(completion), _content(prompt).rstrip().endswith("<think>")))
        for completion, prompt in zip(completions, prompts, strict=True)
    ]


def _well_formed(text: str, prefilled: bool) -> bool:
    thinking, closing, answer = text.partition("</think>")
    opened = thinking.lstrip().startswith("<think>")
    tags = text.count("<think>")
    if not closing or "</think>" in answer or tags != int(opened) or (opened and prefilled):
        return False
    return bool((last_boxed(answer) or "").strip())


def _content(message: Completion | None) -> str:
    if not message:
        return ""
    return message if isinstance(message, str) else message[-1]["content"] or ""


_BOX = re.compile(r"\\{1,2}(?:boxed|fbox)\s*\{|\\boxed +(-?\d[\d.,]*)|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{…}` (or `\fbox{…}`, or `\boxed 4`) of `text`, or None.

    One pass, whatever the text. Of nested boxes the outermost balanced one counts; escaped braces do not; a box that
    never closes is no box, so the one before it counts.
    """
    if "\\boxed" not in text and "\\fbox" not in text:
        return None
    last, opened = None, []  # opened: where the content of each open box begins, None for a plain brace
    for match in _BOX.finditer(text):
        token = match[0]
        if match[1]:
            last = match.span(1)
        elif token == "}":
            if opened and (start := opened.pop()) is not None:
                last = (start, match.start())
        elif token == "{" or token[-1] == "{" and len(token) > 2:
            opened.append(None if token == "{" else match.end())
    return None if last is None else text[slice(*last)]


def _gold(text: str) -> str:
    boxed = last_boxed(text or "")
    return (text or "") if boxed is None else boxed


# ------------------------------------------------------------------------------------------------------ verification


def verify(answer: str | None, gold: str, deadline: float = DEADLINE) -> bool | None:
    """`verify_batch` of one pair."""
    return verify_batch([(answer, gold)], deadline)[0]


def verify_batch(pairs: Sequence[tuple[str | None, str]], deadline: float = DEADLINE) -> list[bool | None]:
    """Grade (answer, gold) pairs, each the inside of a box; may be called from any thread.

    Args:
        pairs: B pairs; an answer of None is a missing one. Equal pairs are graded once.
        deadline: seconds that one answer may take before it is wrong.

    Returns:
        B verdicts; None where the gold cannot be parsed.

    Raises:
        RuntimeError: a worker process cannot start (math-verify is not installed, say).
    """
    verdicts: dict[tuple[str, str], bool | None] = {}
    pairs = [(answer or "", gold) for answer, gold in pairs]
    todo = []
    for pair in dict.fromkeys(pairs):
        known = _at_sight(*pair)
        if known is None:
            todo.append(pair)
        else:
            verdicts[pair] = known
    if todo:
        pool = _get_pool()
        verdicts.update(zip(todo, pool.threads.map(lambda pair: pool.ask(*pair, deadline), todo), strict=True))
    return [verdicts[pair] for pair in pairs]


_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})")


def _at_sight(answer: str, gold: str) -> bool | None:
    """The verdict where no parser is needed: two plain integers. None where one is."""
    answer, gold = answer.strip(), gold.strip()  # `int` accepts other surrounding characters than `strip` removes
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return int(answer) == int(gold)
    return None


class _Worker:
    """One `_verifier.py` process at the other end of two pipes."""

    def __init__(self):
        self.process = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", _verifier.__file__, str(_MEMORY_BYTES)],  # -P: this folder must not shadow packages
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # one group to kill, and no Ctrl-C of the terminal
        )
        if self._read(_START_SECONDS) != b"r":
            self.stop()
            raise RuntimeError(
                "a reward worker did not start; its error is above. No math-verify? pip install 'math-verify>=0.8'"
            )

    def stop(self) -> None:
        if self.process is not None:
            self.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def close(self) -> None:
        self.process.stdin.close()
        self.process.stdout.close()

    def ask(self, answer: str, gold: str, deadline: float) -> bool | None:
        """The worker keeps the deadline itself; waiting somewhat longer here is for a machine that swaps or stops."""
        if self.process is None:
            self.start()
        request = json.dumps([answer, gold, deadline]).encode() + b"\n"
        try:
            self.process.stdin.write(request)
            usable = (reply := self._read(deadline + 5)) == b"g"
            if usable:
                reply = self._read(deadline + 5)
        except OSError:
            reply, usable = b"", True
        if reply not in (b"0", b"1", b"n", b"t"):
            self.stop()
        if reply == b"n" or not usable:
            return None
        return reply == b"1"

    def _read(self, seconds: float) -> bytes:
        """The next byte, b"" at the end of the stream or of the wait."""
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN | select.POLLHUP)
        return os.read(self.process.stdout.fileno(), 1) if poll.poll(seconds * 1000) else b""


class _Pool:
    def __init__(self, size: int):
        self.size = size
        self.workers = [_Worker() for _ in range(size)]
        self.threads = ThreadPoolExecutor(size, thread_name_prefix="erpo-reward")
        self.idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self.workers:
            self.idle.put(worker)

    def ask(self, answer: str, gold: str, deadline: float) -> bool | None:
        if len(answer) > _verifier.MAX_LENGTH:
            answer = ""  # still asked, because the gold may be unparseable
        if len(gold) > _verifier.MAX_LENGTH:
            return None
        worker = self.idle.get()
        try:
            return worker.ask(answer, gold, deadline)
        finally:
            self.idle.put(worker)

    def stop(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            worker.stop()


_pool: _Pool | None = None
_lock = threading.Lock()


def _get_pool() -> _Pool:
    global _pool
    with _lock:
        if _pool is None:
            _pool = _Pool(_default_workers())
        return _pool


def _default_workers() -> int:
    """ERPO_REWARD_WORKERS, or this process's share of the CPUs it may use, at most 16."""
    asked = os.environ.get(WORKERS_VARIABLE)
    if asked is not None:
        if not asked.isdecimal() or int(asked) < 1:
            raise ValueError(f"{WORKERS_VARIABLE}={asked!r}: expected a positive integer, e.g. {WORKERS_VARIABLE}=8")
        return int(asked)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MAX_WORKERS, cpus // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def shutdown() -> None:
    """Stop all worker processes; the next call starts new ones. Runs by itself when the interpreter ends."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.stop()


def _forget_after_fork() -> None:
    """The parent's workers are not the child's: drop them without a word, and hold none of their pipes open."""
    global _pool, _lock
    pool, _pool, _lock = _pool, None, threading.Lock()
    for worker in pool.workers if pool else ():
        if worker.process is not None:
            worker.close()
            worker.process.returncode = 0  # so that Popen does not try to reap what is not ours


atexit.register(shutdown)
os.register_at_fork(after_in_child=_forget_after_fork)
