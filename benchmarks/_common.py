"""What the benchmarks of training and of scoring share: a random model of a chosen size, prompts, and a meter."""

import argparse
import ctypes
import gc
import random
import re
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM


def add_model_options(parser: argparse.ArgumentParser):
    parser.add_argument("--hidden_size", type=int, default=192)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocab_size", type=int, default=151_936, help="default: Qwen2's")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)


def save_model(args: argparse.Namespace, folder: Path) -> int:
    """
    A random Qwen2 with tied embeddings, and the tokenizer that belongs to it: one token per word `w<id>`.

    Returns the number of parameters.
    """
    torch.manual_seed(args.seed)
    config = Qwen2Config(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=4 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=max(1, args.hidden_size // 64),
        num_key_value_heads=1,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = Qwen2ForCausalLM(config).to(getattr(torch, args.dtype))
    model.save_pretrained(folder)
    vocab = {f"w{i}": i for i in range(args.vocab_size)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w0", padding_side="left"
    )
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def make_prompts(lengths: list[int], template: int, args: argparse.Namespace) -> list[str]:
    """Random prompts of these lengths in tokens, the first `template` of which are the same in all."""
    rng = random.Random(args.seed)

    def words(n: int) -> list[str]:
        return [f"w{rng.randrange(2, args.vocab_size)}" for _ in range(n)]

    prefix = words(template)
    return [" ".join(prefix + words(length - template)) for length in lengths]


@dataclass
class Lap:
    seconds: float
    peak: float  # bytes above what was allocated at the start


class Meter:
    """
    Wall-clock time and peak memory from each call to the next; memory is counted from `start`.

    On CPU the peak is that of the resident set, into which the heap's fragmentation comes: good for gigabytes, not for
    percents. With `count_tensors` it is that of the tensors, from the profiler, and times are not to be used.
    """

    def __init__(self, device: str, count_tensors: bool = False):
        self.device = torch.device(device)
        self.count_tensors = count_tensors and self.device.type == "cpu"

    def start(self):
        gc.collect()
        if self.device.type == "cpu":
            ctypes.CDLL(None).malloc_trim(0)  # what earlier runs have freed counts for this one as well
        self.laps: dict[str, Lap] = {}
        self._base = self._allocated()
        self._reset()

    def lap(self, name: str):
        self._synchronize()
        seconds = time.perf_counter() - self._clock
        self.laps[name] = Lap(seconds, max(0, self._peak() - self._base))
        self._reset()

    def stop(self):
        if self.count_tensors:
            self._profile.stop()

    def total(self, *names: str) -> Lap:
        laps = [self.laps[name] for name in names]
        return Lap(sum(lap.seconds for lap in laps), max(lap.peak for lap in laps))

    def _reset(self):
        if self.count_tensors:
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
            )
            self._profile.start()
        elif self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")
        self._synchronize()
        self._clock = time.perf_counter()

    def _synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _allocated(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        self._tensors = 0
        return 0 if self.count_tensors else _resident("VmRSS")

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._peak_of_tensors() if self.count_tensors else _resident("VmHWM")

    def _peak_of_tensors(self) -> int:
        self._profile.stop()
        # The raw events: making `FunctionEvent`s of them takes longer than what is measured
        changes = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        peak = self._tensors
        for event in sorted(changes, key=lambda e: e.start_ns()):
            self._tensors += event.nbytes()
            peak = max(peak, self._tensors)
        return peak


def _resident(field: str) -> int:
    """Bytes of this process's resident set, now (VmRSS) or at its peak (VmHWM). Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def quiet_folder() -> tempfile.TemporaryDirectory:
    """A temporary folder; and no progress bars or library warnings around the table."""
    warnings.simplefilter("ignore", FutureWarning)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return tempfile.TemporaryDirectory()


def print_table(rows: list[dict]):
    """Rows of equal keys as a Markdown table; floats with at least three digits."""

    def text(value) -> str:
        if isinstance(value, str):
            return value
        return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"

    cells = [list(rows[0])] + [[text(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
