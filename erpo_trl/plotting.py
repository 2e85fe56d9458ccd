"""The paper's figures, from training logs and evaluation results. Needs matplotlib (extra `plot`)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np


# Okabe-Ito: told apart under every common form of colour blindness. Markers and dashes repeat the distinction.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))

# Panels of the training figure: title, axis label, and the log keys that hold it, the first found wins.
TRAINING_PANELS = (
    ("Reward", "mean reward", ("reward",)),
    ("Query-KL", "nats", ("query_kl",)),  # per token or per prompt, as query_kl_level says
    ("Policy-KL", "nats per token", ("policy_kl", "kl")),
    ("Entropy", "nats per token", ("entropy",)),
)
STEP_LABEL = "optimizer step"


def require_matplotlib() -> None:
    """Raises an `ImportError` that says what to install, where matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'erpo-trl[plot]'.") from error


def _new_figure(columns: int, rows: int = 1, **subplots):
    """An empty figure and its axes `(rows, columns)`, without touching pyplot's global state."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.3), layout="constrained", dpi=150)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for ax in axes.flat:
        ax.grid(alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _legend(figure, axes):
    """One legend for all panels, under them; none where there is a single line to name."""
    handles = {label: h for ax in axes.flat for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    if len(handles) > 1:
        entry_width = 0.7 + 0.09 * max(map(len, handles))  # inches: the line, and the text in the default font
        columns = max(1, min(len(handles), int(figure.get_figwidth() / entry_width)))
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=columns, frameon=False)


def _save(figure, path: str | Path):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _style(i: int) -> dict:
    return {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i % len(DASHES)]}


def load_log_history(run: str | Path) -> list[dict]:
    """
    The Trainer's log of a run.

    Args:
        run: A `trainer_state.json` or a run folder: its own file if it has one, else that of its last checkpoint.

    Raises:
        FileNotFoundError: if there is none.
    """
    run = Path(run)
    checkpoints = sorted(run.glob("checkpoint-*/trainer_state.json"), key=lambda p: int(p.parent.name.split("-")[-1]))
    candidates = [run] if run.is_file() else [path for path in [run / "trainer_state.json"] if path.is_file()]
    candidates += checkpoints[-1:]
    if not candidates:
        raise FileNotFoundError(
            f"No trainer_state.json in {run} or its checkpoint-* folders; give the output_dir of a training run "
            "(with save_strategy other than 'no', or after trainer.save_state())."
        )
    return json.loads(candidates[0].read_text())["log_history"]


def series(log_history: Sequence[Mapping], *keys: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the first of `keys` that the log has; both empty if it has none."""
    for key in keys:
        points = {entry["step"]: entry[key] for entry in log_history if entry.get(key) is not None}
        if points:
            steps = sorted(points)  # a resumed run logs a step twice: the later entry counts
            return np.array(steps), np.array([points[step] for step in steps], dtype=float)
    return np.array([]), np.array([])


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred moving mean over `window` entries, fewer at the ends."""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _spans_decades(values: Sequence[float]) -> bool:
    """Whether the positive values span over two decades; the near-zero ones of the first steps don't count."""
    positive = [v for v in values if v > 0]
    return len(positive) > 0 and np.percentile(positive, 95) > 100 * np.percentile(positive, 5)


def plot_training(runs, path: str | Path, smoothing: int | None = None) -> None:
    """
    Training dynamics: reward, Query-KL, Policy-KL and entropy against the optimizer step (Figures 1, 4, 6 and 7d).

    A quantity that no run logged has no panel. The KL panels are logarithmic where values span over two decades.

    Args:
        runs: A log history (list of dicts), a run folder or `trainer_state.json`, or a mapping of names to such.
        path: Image to write; its ending gives the format.
        smoothing: Logged points in the moving mean that is drawn over the pale raw line; default a twentieth of them.

    Raises:
        ImportError: without matplotlib.
        ValueError: if there is nothing to draw.
    """
    runs = dict(runs) if isinstance(runs, Mapping) else {"run": runs}
    histories = {name: load_log_history(run) if isinstance(run, str | Path) else run for name, run in runs.items()}
    panels = [p for p in TRAINING_PANELS if any(len(series(log, *p[2])[0]) for log in histories.values())]
    if not panels:
        raise ValueError(
            f"The log of {', '.join(histories)} has none of the keys "
            f"{', '.join(key for *_, keys in TRAINING_PANELS for key in keys)}; is it a GRPO-like run's log_history?"
        )
    figure, axes = _new_figure(len(panels))
    for ax, (title, label, keys) in zip(axes.flat, panels, strict=True):
        everything = []
        for i, (name, log) in enumerate(histories.items()):
            steps, values = series(log, *keys)
            if not len(steps):
                continue
            window = smoothing or max(1, len(values) // 20)
            if window > 1:
                ax.plot(steps, values, color=COLORS[i % len(COLORS)], alpha=0.25, linewidth=0.8)
            marker = MARKERS[i % len(MARKERS)] if len(steps) < 30 else None
            ax.plot(steps, smooth(values, window), label=name, marker=marker, markersize=4, **_style(i))
            everything.extend(values)
        if title.endswith("KL") and _spans_decades(everything):
            ax.set_yscale("log")
        ax.set(title=title, xlabel=STEP_LABEL, ylabel=label)
    _legend(figure, axes)
    _save(figure, path)


def plot_accuracy_temperature(
    curves: Mapping[str, Mapping[str, Mapping[float, Sequence[float]]]], path: str | Path
) -> None:
    """
    Accuracy against sampling temperature, a panel per metric or benchmark, a line per model (Figures 7a and 8).

    Args:
        curves: `{panel: {model: {temperature: (value, low, high)}}}`, in 0 … 1; the band is the 95 % interval.
        path: Image to write.
    """
    columns = min(3, len(curves))
    figure, axes = _new_figure(columns, -(-len(curves) // columns))
    models = list(dict.fromkeys(name for panel in curves.values() for name in panel))
    for ax, (title, panel) in zip(axes.flat, curves.items(), strict=False):
        for name, points in panel.items():
            i = models.index(name)
            temperatures = sorted(points)
            value, low, high = 100 * np.array([points[t] for t in temperatures], dtype=float).T
            ax.plot(temperatures, value, label=name, marker=MARKERS[i % len(MARKERS)], markersize=4, **_style(i))
            ax.fill_between(temperatures, low, high, color=COLORS[i % len(COLORS)], alpha=0.15, linewidth=0)
        ax.set(title=title, ylabel="accuracy (%)", xlabel="sampling temperature")
        ax.set_ylim(bottom=0)
    for ax in axes.flat[len(curves) :]:
        ax.set_axis_off()
    _legend(figure, axes)
    _save(figure, path)


def plot_checkpoints(curves: Mapping[str, Mapping[float, Mapping[int, float]]], path: str | Path) -> None:
    """
    Accuracy of the saved checkpoints, a panel per run, a line per sampling temperature (Figure 5).

    Args:
        curves: `{run: {temperature: {optimizer step: accuracy in 0 … 1}}}`.
        path: Image to write.
    """
    figure, axes = _new_figure(len(curves), sharey=True, sharex=True)
    from matplotlib import colormaps

    temperatures = sorted({t for run in curves.values() for t in run})
    # Temperature is ordered, and so is the palette: dark to light, also in grey; its palest end is left out
    shades = dict(zip(temperatures, colormaps["viridis"](np.linspace(0, 0.85, len(temperatures))), strict=True))
    for ax, (name, run) in zip(axes.flat, curves.items(), strict=True):
        for i, t in enumerate(temperatures):
            steps = sorted(run.get(t, {}))
            accuracy = [100 * run[t][step] for step in steps]
            ax.plot(
                steps, accuracy, color=shades[t], marker=MARKERS[i % len(MARKERS)], markersize=4, label=f"T = {t:g}"
            )
        ax.set(title=name, xlabel=STEP_LABEL, ylabel="accuracy (%)")
    axes[0, 0].set_ylim(bottom=0)  # once all is drawn: it ends the scaling that the panels share
    _legend(figure, axes)
    _save(figure, path)


def plot_nll_correlation(prompt_nll, response_nll, correlations: Mapping[str, float], path: str | Path) -> None:
    """
    Prompt NLL against response NLL as a histogram (Figure 9), with the bound of the 5 % tail.

    Args:
        prompt_nll, response_nll: Sums in nats, one per question.
        correlations: As `evaluation.correlation.nll_correlation` returns them.
        path: Image to write.
    """
    prompt_nll, response_nll = np.asarray(prompt_nll), np.asarray(response_nll)
    figure, ((ax,),) = _new_figure(1)
    figure.set_size_inches(6, 4.4)
    bins = int(np.clip(np.sqrt(len(prompt_nll)), 10, 60))
    *_, image = ax.hist2d(prompt_nll, response_nll, bins=bins, cmap="cividis_r", cmin=1)
    figure.colorbar(image, ax=ax, label="questions")
    bound = correlations["tail_bound"]
    ax.axvline(bound, color=COLORS[1], linestyle="--", label=f"95 % of prompts below {bound:.3g} nats")
    ax.set(
        title=f"r = {correlations['all']:.2f}, without the 5 % tail {correlations['without_tail']:.2f}",
        xlabel="prompt NLL (nats)",
        ylabel="response NLL (nats)",
    )
    figure.legend(loc="outside lower center", frameon=False)
    _save(figure, path)
