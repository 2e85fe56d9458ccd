"""
Figures and tables across runs. Every run is given as [name=]folder.

    python recipes/plot_runs.py training GRPO=runs/grpo ERPO=runs/erpo --output dynamics.png
    python recipes/plot_runs.py checkpoints GRPO=runs/evaluation/grpo ERPO=runs/evaluation/erpo
    python recipes/plot_runs.py consistency --method ERPO runs/erpo TP1=runs/evaluation/erpo-tp1 \
        TP2=runs/evaluation/erpo-tp2 --output consistency.md

`training` draws reward, Query-KL, Policy-KL and entropy against the optimizer step (Figures 1, 4, 6, 7d).
`checkpoints` draws the accuracy of each checkpoint at each temperature (Figure 5), and `consistency` writes the
train-evaluation gaps (Tables 4 and 5); both need what `recipes/evaluate.py --checkpoints` wrote. The model before
training counts if it was evaluated with `--output_dir <the same folder>/checkpoint-0`.
"""

import argparse
from pathlib import Path

from erpo_trl.evaluation.consistency import (
    checkpoint_accuracy,
    load_checkpoints,
    render_gap_tables,
    train_accuracy,
)
from erpo_trl.evaluation.storage import write_text
from erpo_trl.plotting import load_log_history, plot_checkpoints, plot_training


def named(items: list[str]) -> dict[str, str]:
    """`["ERPO=runs/erpo", "runs/grpo"]` → `{"ERPO": "runs/erpo", "grpo": "runs/grpo"}`"""
    pairs = [item.split("=", 1) if "=" in item else (Path(item).name, item) for item in items]
    if len(dict(pairs)) < len(pairs):
        raise SystemExit(f"Two runs share a name in {' '.join(items)}; give them as name=folder.")
    return dict(pairs)


def training(args):
    plot_training(named(args.runs), args.output, args.smoothing)


def checkpoints(args):
    curves = {}
    for name, folder in named(args.evaluations).items():
        evaluations = load_checkpoints(folder)
        temperatures = sorted({t for e in evaluations.values() for t in e.temperatures})
        curves[name] = {
            t: checkpoint_accuracy({s: e for s, e in evaluations.items() if t in e.temperatures}, [t])
            for t in temperatures
        }
    plot_checkpoints(curves, args.output)


def consistency(args):
    runs = {}
    for name, run, *evaluations in args.method:
        if not evaluations:
            raise SystemExit(f"--method {name} {run} needs at least one evaluation folder.")
        accuracy = {
            backend: checkpoint_accuracy(load_checkpoints(folder), args.temperatures)
            for backend, folder in named(evaluations).items()
        }
        steps = sorted(next(iter(accuracy.values())))
        runs[name] = (train_accuracy(load_log_history(run), steps, args.window), accuracy)
    text = render_gap_tables(runs)
    write_text(Path(args.output), text)
    print(text)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("training", help="training dynamics")
    command.add_argument("runs", nargs="+", help="run folders or trainer_state.json files")
    command.add_argument("--smoothing", type=int, help="logged points in the moving mean")
    command.add_argument("--output", default="training.png")
    command.set_defaults(run=training)

    command = commands.add_parser("checkpoints", help="accuracy by checkpoint and temperature")
    command.add_argument("evaluations", nargs="+", help="folders with checkpoint-<step>/samples")
    command.add_argument("--output", default="checkpoints.png")
    command.set_defaults(run=checkpoints)

    command = commands.add_parser("consistency", help="train-evaluation gaps")
    command.add_argument(
        "--method",
        nargs="+",
        action="append",
        required=True,
        metavar="NAME RUN EVALUATION",
        help="name, run folder, and one [name=]folder per back-end; repeat for other methods, the baseline first",
    )
    command.add_argument("--temperatures", nargs="+", type=float, default=[1.0], help="evaluated ones to average")
    command.add_argument("--window", type=int, default=10, help="optimizer steps of training accuracy averaged")
    command.add_argument("--output", default="consistency.md")
    command.set_defaults(run=consistency)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse_args()
    args.run(args)
