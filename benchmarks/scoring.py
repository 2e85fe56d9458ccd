"""
How fast `score_queries` scores prompts, and in how much memory, against the loop everyone writes.

    python benchmarks/scoring.py
    python benchmarks/scoring.py --hidden_size 1536 --layers 28 --dtype bfloat16 --rows 2000 --batch_tokens 4096  # GPU

- *loop*: rows in dataset order, a fixed number at a time, padded; full logits, log_softmax in float32, gather.
- *score_queries*: with an empty cache; tokenizing, hashing and caching included.
- *bare forward*: the batches that `score_queries` makes, through the model and no further.

They take turns in one process; a ratio is the median of the rounds'. Tokens are those of the prompts, without padding.
Memory is the weights plus the measured peak above them (resident set on CPU).
"""

import argparse
import os
import random
from pathlib import Path
from statistics import median


os.environ.setdefault("TQDM_DISABLE", "1")

import torch  # noqa: E402
from _common import Lap, Meter, add_model_options, make_prompts, print_table, quiet_folder, save_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from erpo_trl import score_queries  # noqa: E402


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_model_options(parser)
    parser.add_argument("--rows", type=int, default=96)
    parser.add_argument("--template_tokens", type=int, default=32, help="shared by all prompts")
    parser.add_argument("--median_tokens", type=int, default=48, help="of the questions, whose lengths are log-normal")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the questions' lengths")
    parser.add_argument("--max_tokens", type=int, default=384, help="longest question")
    parser.add_argument("--loop_batch_size", type=int, default=16)
    parser.add_argument("--batch_tokens", type=int, default=4096, help="of `score_queries`")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args(argv)


def skewed_lengths(args: argparse.Namespace) -> list[int]:
    """Prompt lengths in tokens: the template's and a log-normal question's."""
    rng = random.Random(args.seed)
    questions = [int(args.median_tokens * rng.lognormvariate(0, args.sigma)) for _ in range(args.rows)]
    return [args.template_tokens + min(args.max_tokens, max(2, length)) for length in questions]


@torch.no_grad()
def loop(model, tokenizer, prompts: list[str], batch_size: int) -> list[float]:
    """The sum of the log-probs of each prompt's tokens from the second on."""
    totals = []
    for start in range(0, len(prompts), batch_size):
        batch = tokenizer(prompts[start : start + batch_size], return_tensors="pt", padding=True, padding_side="right")
        input_ids, mask = batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device)
        logits = model(input_ids=input_ids, attention_mask=mask).logits[:, :-1]  # (B, T-1, V)
        logps = logits.float().log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        totals += (logps * mask[:, 1:]).sum(1).tolist()
    return totals


@torch.no_grad()
def bare_forward(model, batches: list[dict]):
    for batch in batches:
        model(**batch)


def record_batches(model, run) -> list[dict]:
    """The inputs of the forwards that `run` makes."""
    batches = []

    def keep(module, args, kwargs):
        batches.append({key: kwargs[key] for key in ("input_ids", "attention_mask")})

    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return batches


def measure(folder: Path, args: argparse.Namespace) -> tuple[list[dict[str, Lap]], int]:
    """Per round, seconds and bytes in all of each contender; and the number of tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    lengths = skewed_lengths(args)
    prompts = make_prompts(lengths, args.template_tokens, args)
    dataset = Dataset.from_dict({"prompt": prompts})
    caches = iter(range(args.rounds + 1))

    def score():
        cache_dir = folder / "scores" / str(next(caches))
        options = {"query_scope": "prompt", "batch_tokens": args.batch_tokens, "cache_dir": cache_dir}
        return score_queries(dataset, model, tokenizer, **options)["ref_query_logp"]

    results = {}
    batches = record_batches(model, score)  # also warms up
    contenders = {
        "loop": lambda: loop(model, tokenizer, prompts, args.loop_batch_size),
        "score_queries": score,
        "bare forward": lambda: bare_forward(model, batches),
    }
    meter, rounds = Meter(args.device), []
    for _ in range(args.rounds):
        laps = {}
        for name, run in contenders.items():
            meter.start()
            results[name] = run()
            meter.lap(name)
            laps[name] = Lap(meter.laps[name].seconds, meter.laps[name].peak + weights)
        rounds.append(laps)
    difference = max(abs(a - b) for a, b in zip(results["loop"], results["score_queries"], strict=True))
    print(f"Largest difference of a prompt's log-likelihood from the loop's: {difference:.2g} nats")
    return rounds, sum(lengths)


def table(rounds: list[dict[str, Lap]], n_tokens: int) -> list[dict]:
    ours = "score_queries"
    rows = []
    for name in rounds[0]:
        rows.append(
            {
                "": name,
                "tokens/s": median(n_tokens / laps[name].seconds for laps in rounds),
                "peak memory (MB)": median(laps[name].peak / 1e6 for laps in rounds),
                f"{ours}: speed": median(laps[name].seconds / laps[ours].seconds for laps in rounds),
                f"{ours}: memory": median(laps[ours].peak / laps[name].peak for laps in rounds),
                "target": "≥ 3 × speed, ≤ 1/4 memory" if name == "loop" else "",
            }
        )
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse_args(argv)
    with quiet_folder() as folder:
        n_parameters = save_model(args, Path(folder))
        lengths = sorted(skewed_lengths(args))
        print(
            f"{n_parameters / 1e6:.0f} M parameters, {args.vocab_size} tokens, {args.dtype}, {args.device}; "
            f"{args.rows} prompts of {lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}, mean "
            f"{sum(lengths) / len(lengths):.0f}); loop: {args.loop_batch_size} rows, score_queries: "
            f"{args.batch_tokens} padded tokens per forward; median of {args.rounds} rounds"
        )
        rows = table(*measure(Path(folder), args))
    print_table(rows)
    return rows


if __name__ == "__main__":
    main()
