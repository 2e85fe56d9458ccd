"""Train-evaluation consistency (Appendix C of arXiv 2608.23311): both accuracies at every saved checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .report import Evaluation, estimate, load_evaluation, markdown_table


TRAIN_ACCURACY = "rewards/accuracy_reward/mean"


def train_accuracy(log_history: Sequence[Mapping], steps: Sequence[int], window: int = 10) -> dict[int, float]:
    """
    Training accuracy around each checkpoint, from the Trainer's log.

    Args:
        log_history: Of `trainer_state.json`.
        steps: Optimizer steps of the checkpoints. Step 0 gets the first logged value, sampled by the initial model.
        window: The mean is over what was logged in the last `window` optimizer steps up to the checkpoint (this
            project's choice; the paper doesn't say).

    Raises:
        ValueError: if nothing was logged there.
    """
    logged = {entry["step"]: entry[TRAIN_ACCURACY] for entry in log_history if TRAIN_ACCURACY in entry}
    if not logged:
        raise ValueError(f"The training log has no {TRAIN_ACCURACY!r}; was the run's reward `accuracy_reward`?")
    accuracy = {}
    for step in steps:
        inside = [v for s, v in logged.items() if step - window < s <= step] if step else [logged[min(logged)]]
        if not inside:
            raise ValueError(
                f"Nothing was logged in the {window} optimizer steps up to checkpoint {step}; the log covers steps "
                f"{min(logged)} to {max(logged)}. Use a larger --window."
            )
        accuracy[step] = float(np.mean(inside))
    return accuracy


def load_checkpoints(folder: str | Path) -> dict[int, Evaluation]:
    """
    Results of a run's checkpoints, by optimizer step.

    Args:
        folder: Has `checkpoint-<step>/samples/`, as `recipes/evaluate.py --checkpoints` writes them.
    """
    paths = {int(path.name.split("-")[-1]): path for path in Path(folder).glob("checkpoint-*") if path.is_dir()}
    if not paths:
        raise FileNotFoundError(
            f"No checkpoint-<step> in {folder}; make them with: python recipes/evaluate.py --checkpoints <run folder> "
            f"--output_dir {folder}"
        )
    return {step: load_evaluation(paths[step]) for step in sorted(paths)}


def checkpoint_accuracy(evaluations: Mapping[int, Evaluation], temperatures: Sequence[float]) -> dict[int, float]:
    """Accuracy of each checkpoint: over questions, benchmarks and these temperatures."""
    return {
        step: estimate([e.values("avg@k", b, temperatures, 1) for b in e.benchmarks])[0]
        for step, e in evaluations.items()
    }


def gap_summary(train: Mapping[int, float], evaluations: Mapping[str, Mapping[int, float]]) -> dict:
    """
    One row of Table 4: averages over the checkpoints after step 0, in the units given.

    Args:
        train: Training accuracy by step.
        evaluations: Evaluation accuracy by step, per back-end or tensor-parallel size, at the same steps.

    Returns:
        `train`, `eval` and `gap` (train - eval) per back-end, and `average_gap` over them.
    """
    for name, accuracy in evaluations.items():
        if accuracy.keys() != train.keys():
            raise ValueError(f"{name} was evaluated at steps {sorted(accuracy)}, expected {sorted(train)}.")
    steps = [step for step in train if step > 0]
    mean_train = float(np.mean([train[s] for s in steps]))
    mean_eval = {name: float(np.mean([accuracy[s] for s in steps])) for name, accuracy in evaluations.items()}
    gap = {name: mean_train - value for name, value in mean_eval.items()}
    return {"train": mean_train, "eval": mean_eval, "gap": gap, "average_gap": float(np.mean(list(gap.values())))}


def render_gap_tables(runs: Mapping[str, tuple[Mapping[int, float], Mapping[str, Mapping[int, float]]]]) -> str:
    """
    Tables 4 and 5 in Markdown, in %.

    Args:
        runs: `{method: (train accuracy by step, {back-end: evaluation accuracy by step})}`, accuracies in 0 … 1. With
            two or more methods, the improvement of the last on the first is shown.
    """
    backends = list(next(iter(runs.values()))[1])
    header = ["Method", "Avg. train", *(f"Avg. eval, {b}" for b in backends)]
    header += [*(f"Gap, {b}" for b in backends), "Avg. gap"]
    summaries = {name: gap_summary(*run) for name, run in runs.items()}

    def gaps(summary):
        return [*(summary["gap"][b] for b in backends), summary["average_gap"]]

    rows = []
    for name, summary in summaries.items():
        values = [summary["train"], *(summary["eval"][b] for b in backends), *gaps(summary)]
        rows.append([name, *(f"{100 * value:.1f}" for value in values)])
    if len(summaries) > 1:
        first, *_, last = summaries.values()
        changes = [_change(old, new) for old, new in zip(gaps(first), gaps(last), strict=True)]
        rows.append(["Improvement", *["–"] * (1 + len(backends)), *changes])
    parts = ["# Train-evaluation consistency", "## Averages after step 0 (%)\n\n" + markdown_table(header, rows)]
    for name, (train, evaluations) in runs.items():
        steps = sorted(train)
        lines = {"Train": train} | {f"Eval, {backend}": accuracy for backend, accuracy in evaluations.items()}
        table = [
            [label, *(f"{100 * accuracy[s]:.2f}" for s in steps), f"{100 * np.mean(list(accuracy.values())):.2f}"]
            for label, accuracy in lines.items()
        ]
        header = ["Accuracy (%)", *(f"step {s}" for s in steps), "Avg."]
        parts.append(f"## {name}\n\n{markdown_table(header, table)}")
    return "\n\n".join(parts) + "\n"


def _change(old: float, new: float) -> str:
    """A gap's change in percentage points, and relative to the old gap where that was positive."""
    relative = f" ({100 * abs(old - new) / old:.0f} %)" if old > 0 else ""
    return f"{'↓' if new <= old else '↑'} {100 * abs(old - new):.1f}{relative}"
