"""
How scoring grows with the data: time and peak memory of `score_queries` over more and more short prompts.

    python benchmarks/scale.py
    python benchmarks/scale.py --rows 2000 4000 8000

All prompts differ, so that none is scored for another; the model is tiny, so that what is measured is everything
around its forwards as well. Each size runs in a process of its own. Time should be linear in tokens, and memory in
rows: the scores, which the dataset gets as columns, and the token ids, without the batches' activations. The line is
fitted to CPU time, which other work on the machine does not stretch.

With glibc, `MALLOC_MMAP_THRESHOLD_=262144` before the command gives the memory of what is alive, without the heap's
fragmentation (and takes longer).
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path


os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from _common import Meter, add_model_options, make_prompts, print_table, quiet_folder, save_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from scoring import skewed_lengths  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast  # noqa: E402

from erpo_trl import score_queries  # noqa: E402


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_model_options(parser)
    parser.set_defaults(hidden_size=64, layers=2, vocab_size=1000)
    parser.add_argument("--rows", type=int, nargs="+", default=[25_000, 50_000, 100_000, 200_000])
    parser.add_argument("--template_tokens", type=int, default=8, help="shared by all prompts")
    parser.add_argument("--median_tokens", type=int, default=16, help="of the questions, whose lengths are log-normal")
    parser.add_argument("--sigma", type=float, default=0.5, help="of the logarithm of the questions' lengths")
    parser.add_argument("--max_tokens", type=int, default=120, help="longest question")
    parser.add_argument("--batch_tokens", type=int, default=4096, help="of `score_queries`")
    return parser.parse_args(argv)


def measure(folder: str, n_rows: int, args: argparse.Namespace) -> dict:
    """Tokens, seconds and peak resident bytes (in all, and above data and model) of scoring so many prompts."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).to(args.device)
    lengths = skewed_lengths(argparse.Namespace(**vars(args) | {"rows": n_rows}))
    dataset = Dataset.from_dict({"prompt": make_prompts(lengths, args.template_tokens, args)})
    options = {"batch_tokens": args.batch_tokens, "cache_dir": f"{folder}/scores-{n_rows}"}
    score_queries(dataset.select(range(64)), model, tokenizer, **options | {"cache_dir": f"{folder}/warm-up"})
    meter = Meter("cpu")
    meter.start()
    before, cpu_time = meter._base, time.process_time()
    score_queries(dataset, model, tokenizer, **options)
    meter.lap("score")
    lap = meter.laps["score"]
    return {
        "rows": n_rows,
        "tokens": sum(lengths),
        "seconds": lap.seconds,
        "cpu_seconds": time.process_time() - cpu_time,
        "peak": before + lap.peak,
        "above": lap.peak,
    }


def linear_fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and R² of the least-squares line."""
    slope, intercept = np.polyfit(x, y, 1)
    residual = np.array(y) - (slope * np.array(x) + intercept)
    return slope, intercept, 1 - residual.var() / np.var(y)


def table_row(result: dict) -> dict:
    return {
        "rows": f"{result['rows']:,}",
        "tokens": f"{result['tokens']:,}",
        "seconds": result["seconds"],
        "CPU seconds": result["cpu_seconds"],
        "tokens/s": result["tokens"] / result["seconds"],
        "peak RSS (MB)": result["peak"] / 1e6,
        "of it for scoring (MB)": result["above"] / 1e6,
    }


def print_fits(results: list[dict]):
    tokens, rows, seconds, above = ([r[key] for r in results] for key in ("tokens", "rows", "cpu_seconds", "above"))
    slope, intercept, r2 = linear_fit(tokens, seconds)
    print(f"CPU time = {slope * 1e6:.2f} µs × tokens {intercept:+.2f} s (R² = {r2:.5f})")
    slope, intercept, r2 = linear_fit(rows, above)
    per_token = slope * rows[-1] / tokens[-1]
    print(f"memory = {slope:.0f} bytes × rows ({per_token:.0f} a token) {intercept / 1e6:+.0f} MB (R² = {r2:.5f})")


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse_args(argv)
    with quiet_folder() as folder:
        save_model(args, Path(folder))
        results = []
        for n_rows in args.rows:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                results.append(process.submit(measure, folder, n_rows, args).result())
    print_table([table_row(result) for result in results])
    if len(results) > 2:
        print_fits(results)
    return results


if __name__ == "__main__":
    main()
