"""
What a training step of ERPO costs, against GRPO without (β = 0) and with (β = 0.01) a Policy-KL.

    python benchmarks/step_overhead.py
    python benchmarks/step_overhead.py --hidden_size 1536 --layers 28 --dtype bfloat16 --prompt_tokens 512 \
        --completion_tokens 1024 --per_device_train_batch_size 16 --num_generations 8    # on a GPU

The three take turns in one process, on equal models, prompts and completions; a ratio is the median of the rounds'.
Prompts are scored before the clock starts, as they are in training. Memory is weights, reference model and optimizer
state, plus the measured peak of tensors above them, in rounds of their own.

On CPU, TRL's LM head projects every position, on CUDA only those whose log-prob is wanted: there, the prompt tokens
that ERPO adds are to be paid for. `--compact_head` makes a CPU do as CUDA does.
"""

import argparse
import os
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from unittest import mock


os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's

import torch  # noqa: E402
from _common import Lap, Meter, add_model_options, make_prompts, print_table, quiet_folder, save_model  # noqa: E402
from datasets import Dataset  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from erpo_trl import ERPOConfig, ERPOTrainer  # noqa: E402


METHODS = {
    "GRPO": (GRPOTrainer, GRPOConfig, {"beta": 0.0}),
    "ERPO": (ERPOTrainer, ERPOConfig, {"beta": 0.0}),
    "GRPO β=0.01": (GRPOTrainer, GRPOConfig, {"beta": 0.01}),
}
PHASES = {
    "loss + backward": ["loss"],
    "all but generation": ["prepare", "score", "loss", "update"],
    "whole step": ["prepare", "generate", "score", "loss", "update"],
}
TARGETS = {
    ("loss + backward", "time"): "≤ 1.03 × GRPO",
    ("all but generation", "time"): "≤ 0.8 × GRPO β=0.01",
    ("whole step", "time"): "≤ 1.03 × GRPO",
    ("loss + backward", "memory"): "≤ 1.03 × GRPO",
    ("whole step", "memory"): "≤ 1.03 × GRPO",
}


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_model_options(parser)
    parser.add_argument("--prompt_tokens", type=int, default=256, help="longest prompt; the shortest has 3/4 of it")
    parser.add_argument("--template_tokens", type=int, default=32, help="shared by all prompts, not scored")
    parser.add_argument("--completion_tokens", type=int, default=32)
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--num_generations", type=int, default=2)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--compact_head", action="store_true", help="on CPU: project only what is scored, as on CUDA")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(argv)


def reward(completions: list[str], **kwargs) -> list[float]:
    """Any deterministic function of the completion."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


def make_trainer(method: str, folder: Path, args: argparse.Namespace) -> GRPOTrainer:
    """A trainer that has made its first step, by the usual loop, and is ready for more."""
    trainer_class, config_class, options = METHODS[method]
    shortest = args.prompt_tokens * 3 // 4
    lengths = [shortest + i * (args.prompt_tokens - shortest) // 15 for i in range(16)]
    config = config_class(
        output_dir=str(folder / "out"),
        model_init_kwargs={"dtype": args.dtype},
        per_device_train_batch_size=args.per_device_train_batch_size,
        num_generations=args.num_generations,
        max_completion_length=args.completion_tokens,
        generation_kwargs={"min_new_tokens": args.completion_tokens},
        gradient_checkpointing=args.gradient_checkpointing,
        max_steps=1,
        use_cpu=args.device == "cpu",
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=args.seed,
        **options,
    )
    dataset = Dataset.from_dict({"prompt": make_prompts(lengths, args.template_tokens, args)})
    trainer = trainer_class(str(folder), reward, config, dataset)
    trainer.log = lambda *args, **kwargs: None
    trainer.train()
    return trainer


def instrument(trainer: GRPOTrainer, meter: Meter, args: argparse.Namespace):
    """End laps where generation begins and ends and where the batch is ready; completions are the same for all."""
    generate, prepare = trainer._generate_single_turn, trainer._prepare_inputs
    shape = (args.per_device_train_batch_size, args.completion_tokens)
    completions = torch.randint(2, args.vocab_size, shape, generator=torch.Generator().manual_seed(args.seed))

    def timed_generate(*args, **kwargs):
        meter.lap("prepare")
        _, logprobs = generate(*args, **kwargs)
        meter.lap("generate")
        return completions.tolist(), logprobs

    def timed_prepare(batch):
        inputs = prepare(batch)
        meter.lap("score")
        return inputs

    trainer._generate_single_turn, trainer._prepare_inputs = timed_generate, timed_prepare


def step(trainer: GRPOTrainer, batch: list[dict], meter: Meter) -> dict[str, Lap]:
    """One optimizer step, as the trainer's loop makes it."""
    model = trainer.model_wrapped
    model.train()
    meter.start()
    trainer.training_step(model, batch, None)
    meter.lap("loss")
    trainer.accelerator.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    meter.lap("update")
    meter.stop()
    trainer.state.global_step += 1
    return {phase: meter.total(*laps) for phase, laps in PHASES.items()}


def state_bytes(trainer: GRPOTrainer) -> int:
    """Weights, those of the reference model, and the optimizer's state."""
    models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
    tensors = [p for model in models for p in model.parameters()]
    tensors += [t for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t)]
    return sum(t.numel() * t.element_size() for t in tensors)


def measure(folder: Path, args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Per round, method and phase: seconds; and, per round of their own, bytes in all."""
    trainers = {method: make_trainer(method, folder, args) for method in METHODS}
    batches = {method: iter(trainer.get_train_dataloader()) for method, trainer in trainers.items()}
    meter = Meter(args.device)
    for trainer in trainers.values():
        instrument(trainer, meter, args)

    def take_turns() -> dict[str, dict[str, Lap]]:
        return {method: step(trainer, next(batches[method]), meter) for method, trainer in trainers.items()}

    times = [take_turns() for _ in range(args.rounds)]
    meter.count_tensors = args.device == "cpu"
    memory = [take_turns() for _ in range(2)][1:]  # the first round's profiler misses what was allocated before it
    for laps in memory:
        for method, trainer in trainers.items():
            laps[method] = {p: Lap(lap.seconds, lap.peak + state_bytes(trainer)) for p, lap in laps[method].items()}
    return times, memory


def table(times: list[dict], memory: list[dict]) -> list[dict]:
    rows = []
    for quantity, unit, rounds in (("time", "s", times), ("memory", "MB", memory)):
        for phase in PHASES:
            values = [
                {m: laps[m][phase].seconds if unit == "s" else laps[m][phase].peak / 1e6 for m in METHODS}
                for laps in rounds
            ]
            row = {"": f"{quantity}, {phase} ({unit})"}
            for method in METHODS:
                row[method] = median(value[method] for value in values)
            for base in ("GRPO", "GRPO β=0.01"):
                row[f"ERPO / {base}"] = median(value["ERPO"] / value[base] for value in values)
            rows.append(row | {"target": TARGETS.get((phase, quantity), "")})
    return rows


def main(argv: list[str] | None = None) -> list[dict]:
    args = parse_args(argv)
    # TRL asks this to decide which positions to project; the kernels ask a function of their own
    compact = mock.patch("trl.trainer.utils._use_triton", lambda device: True) if args.compact_head else nullcontext()
    with quiet_folder() as folder, mock.patch.dict(os.environ, ERPO_TRL_CACHE=f"{folder}/scores"), compact:
        n_parameters = save_model(args, Path(folder))
        print(
            f"{n_parameters / 1e6:.0f} M parameters, {args.vocab_size} tokens, {args.dtype}, {args.device}; "
            f"{args.per_device_train_batch_size} rows of {args.prompt_tokens * 3 // 4} to {args.prompt_tokens} + "
            f"{args.completion_tokens} tokens, {args.num_generations} per prompt; median of {args.rounds} rounds"
        )
        rows = table(*measure(Path(folder), args))
    print_table(rows)
    return rows


if __name__ == "__main__":
    main()
