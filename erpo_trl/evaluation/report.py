"""From results on disk to the paper's tables (Markdown and JSON) and its accuracy-temperature figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from .benchmarks import SOURCES
from .metrics import band_temperatures, bootstrap_interval, cell_metrics, paired_difference
from .storage import read_cell, read_settings, write_json, write_text


TABLE_METRICS = ("avg@k", "pass@k", "pass@1", "majority@k")


@dataclass
class Evaluation:
    """
    Results of one model.

    Args:
        name: As shown in tables.
        samples: By (benchmark, temperature).
        settings: Likewise, as stored with the samples.
    """

    name: str
    samples: dict[tuple[str, float], list[dict]]
    settings: dict[tuple[str, float], dict] = field(default_factory=dict)

    @property
    def benchmarks(self) -> list[str]:
        names = sorted({benchmark for benchmark, _ in self.samples})
        published = [name for name in SOURCES if name in names]  # in the order of Table 1
        return published + [name for name in names if name not in published]

    @property
    def temperatures(self) -> list[float]:
        return sorted({temperature for _, temperature in self.samples})

    @cached_property
    def _tables(self) -> dict:
        return {}

    def values(self, metric: str, benchmark: str, temperatures: Sequence[float], k: int) -> dict[int, float]:
        """A metric per question, averaged over temperatures; questions gradable at all of them."""
        for temperature in temperatures:
            cell = (benchmark, temperature)
            if (cell, k) not in self._tables:
                self._tables[cell, k] = cell_metrics(self.samples[cell], 1 if temperature == 0 else k)
        tables = [self._tables[(benchmark, temperature), k] for temperature in temperatures]
        questions = sorted(set.intersection(*(set(table) for table in tables)))
        return {q: float(np.mean([table[q][metric] for table in tables])) for q in questions}


def load_evaluation(folder: str | Path, name: str | None = None) -> Evaluation:
    """
    Results of one `output_dir` of `run_evaluation`.

    Raises:
        FileNotFoundError: if it has none.
        ValueError: if one of its files is not a whole result file.
    """
    samples, settings = {}, {}
    for path in sorted(Path(folder).glob("samples/*.parquet")):
        found = read_settings(path)
        if found is None:
            raise ValueError(f"{path} is not a whole result file; run the evaluation again, it goes on there.")
        cell = (found["benchmark"], found["temperature"])
        samples[cell], settings[cell] = read_cell(path), found
    if not samples:
        raise FileNotFoundError(f"No samples/*.parquet in {folder}; give an --output_dir of recipes/evaluate.py.")
    return Evaluation(name or Path(folder).name, samples, settings)


def estimate(strata: Sequence[Mapping[int, float]]) -> list[float]:
    """`[mean, low, high]` over questions, of the mean over benchmarks."""
    values = [list(stratum.values()) for stratum in strata]
    if not values or not all(values):
        return [float("nan")] * 3
    return [float(np.mean([np.mean(v) for v in values])), *bootstrap_interval(*values)]


def build_report(evaluations: Sequence[Evaluation]) -> dict:
    """
    The numbers of the report; every estimate is `[value, low, high]` with the 95 % interval.

    Keys: `k`; `temperatures` (common to all models; greedy is not among those averaged); `table1`
    `{metric: {model: {benchmark or "average": …}}}`, means over the temperatures (the paper's Table 1, Figure 3);
    `table2` `{benchmark or "average": {model: {temperature or band: …}}}`, Avg@k (Tables 2 and 6); `curves` `{metric:
    {model: {temperature: …}}}`, means over benchmarks (Figure 8); `differences` `{metric: {model: {benchmark or
    "average": …}}}`, paired with the first model; `samples`, how they came out, per model, benchmark and temperature;
    `settings` of each model's first cell.

    Raises:
        ValueError: if the models have no benchmark or no sampling temperature in common, or two share a name.
    """
    names = [e.name for e in evaluations]
    if len(set(names)) < len(names):
        raise ValueError(f"Models need different names, got {', '.join(names)}; give them as name=folder.")
    benchmarks = [b for b in evaluations[0].benchmarks if all(b in e.benchmarks for e in evaluations)]
    cells = set.intersection(*(set(e.samples) for e in evaluations))
    shared = [t for t in evaluations[0].temperatures if benchmarks and all((b, t) in cells for b in benchmarks)]
    sampled = [t for t in shared if t > 0]
    if not shared:
        raise ValueError(
            "The models have no benchmark with a temperature in common: "
            + "; ".join(f"{e.name}: {', '.join(e.benchmarks)} at {e.temperatures}" for e in evaluations)
        )
    averaged = sampled or shared
    k = min(e.settings[b, t]["k"] for e in evaluations for b in benchmarks for t in averaged)

    def over(e, metric, names, temperatures):
        return estimate([e.values(metric, b, temperatures, k) for b in names])

    columns = {b: [b] for b in benchmarks} | ({"average": benchmarks} if len(benchmarks) > 1 else {})
    rows = {f"{t:g}": [t] for t in shared} | band_temperatures(shared)
    report = {"k": k, "models": names, "benchmarks": benchmarks, "temperatures": averaged}
    report["table1"] = {
        m: {e.name: {c: over(e, m, bs, averaged) for c, bs in columns.items()} for e in evaluations}
        for m in TABLE_METRICS
    }
    report["table2"] = {
        c: {e.name: {r: over(e, "avg@k", bs, ts) for r, ts in rows.items()} for e in evaluations}
        for c, bs in columns.items()
    }
    report["curves"] = {
        m: {e.name: {f"{t:g}": over(e, m, benchmarks, [t]) for t in shared} for e in evaluations}
        for m in TABLE_METRICS
    }
    report["bands"] = band_temperatures(shared)
    report["differences"] = {
        m: {
            e.name: {c: _difference(evaluations[0], e, m, bs, averaged, k) for c, bs in columns.items()}
            for e in evaluations[1:]
        }
        for m in TABLE_METRICS
    }
    report["samples"] = {
        e.name: {
            b: {f"{t:g}": _cell_counts(e, b, t) for t in e.temperatures if (b, t) in e.samples} for b in benchmarks
        }
        for e in evaluations
    }
    report["settings"] = {e.name: next(iter(e.settings.values())) for e in evaluations}
    return report


def _difference(a: Evaluation, b: Evaluation, metric, benchmarks, temperatures, k) -> list[float]:
    for name in benchmarks:
        left, right = (e.settings[name, temperatures[0]]["golds"] for e in (a, b))
        if left != right:
            raise ValueError(f"{a.name} and {b.name} were evaluated on different versions of {name}; run one again.")
    pairs = [[e.values(metric, name, temperatures, k) for name in benchmarks] for e in (a, b)]
    return list(paired_difference(*pairs))


def _cell_counts(e: Evaluation, benchmark: str, temperature: float) -> dict:
    """How the samples of a cell came out."""
    samples, settings = e.samples[benchmark, temperature], e.settings[benchmark, temperature]
    ungraded = len({s["question"] for s in samples if s["correct"] is None})
    return {
        "questions": settings["questions"],
        "without_gold": settings["without_gold"],
        "repeated": settings["repeated"],
        "ungraded": ungraded,
        "samples": len(samples),
        "truncated": sum(s["truncated"] for s in samples),
        "format": float(np.mean([s["format"] for s in samples])),
        "tokens": float(np.mean([s["tokens"] for s in samples])),
    }


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, first column to the left, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _estimates_table(table: Mapping[str, Mapping[str, Sequence[float]]], scale: float = 1, signed=False) -> str:
    """Rows of `{row: {column: [value, low, high]}}`; the best value of a column is bold, as in the paper."""
    columns = list(next(iter(table.values())))
    digits = 1 if scale == 100 else 3
    best = {c: max(row[c][0] for row in table.values()) for c in columns} if len(table) > 1 and not signed else {}

    def cell(column, estimate):
        value, low, high = (f"{scale * x:{'+' if signed else ''}.{digits}f}" for x in estimate)
        if best.get(column) == estimate[0]:
            value = f"**{value}**"
        return value if np.isnan(estimate[1]) else f"{value} [{low}, {high}]"

    rows = [[name, *(cell(c, row[c]) for c in columns)] for name, row in table.items()]
    return markdown_table(["Method", *columns], rows)


def render_markdown(report: Mapping) -> str:
    """The report as Markdown."""
    k = report["k"]
    temperatures = ", ".join(f"{t:g}" for t in report["temperatures"])
    titles = dict(zip(TABLE_METRICS, (f"Avg@{k}", f"Pass@{k}", "Pass@1", f"Majority@{k}"), strict=True))
    parts = [
        "# Evaluation",
        f"Models: {', '.join(report['models'])}. Brackets hold 95 % bootstrap intervals over questions. Pass@1 is the "
        "first sample of each question.",
        f"## Methods × benchmarks\n\nMeans over the temperatures {temperatures}.",
    ]
    parts += [f"### {titles[m]}\n\n{_estimates_table(table)}" for m, table in report["table1"].items()]
    bands = "; ".join(f"{name}: {', '.join(f'{t:g}' for t in ts)}" for name, ts in report["bands"].items())
    parts.append(f"## Method × temperature\n\nAvg@{k} in %. 0 is greedy decoding. Temperatures averaged: {bands}.")
    parts += [f"### {name}\n\n{_estimates_table(table, scale=100)}" for name, table in report["table2"].items()]
    if len(report["models"]) > 1:
        parts.append(
            f"## Differences to {report['models'][0]}\n\nPaired over questions, means over the temperatures "
            f"{temperatures}, in percentage points."
        )
        parts += [
            f"### {titles[m]}\n\n{_estimates_table(table, scale=100, signed=True)}"
            for m, table in report["differences"].items()
        ]
    parts.append("## Samples\n\n" + _samples_table(report["samples"]))
    keys = ("model", "backend", "dtype", "seed", "max_new_tokens")
    rows = [[name, *(str(found.get(key, "–")) for key in keys)] for name, found in report["settings"].items()]
    parts.append("## Settings\n\n" + markdown_table(["Model", *keys], rows))
    return "\n\n".join(parts) + "\n"


def _samples_table(samples: Mapping) -> str:
    header = ["Model", "benchmark", "T", "questions", "without gold", "repeated", "ungraded", "samples", "cut off"]
    rows = [
        [name, benchmark, t]
        + [str(c[key]) for key in ("questions", "without_gold", "repeated", "ungraded", "samples", "truncated")]
        + [f"{100 * c['format']:.1f}", f"{c['tokens']:.1f}"]
        for name, by_benchmark in samples.items()
        for benchmark, by_temperature in by_benchmark.items()
        for t, c in by_temperature.items()
    ]
    return markdown_table([*header, "format (%)", "mean tokens"], rows)


def write_report(evaluations: Sequence[Evaluation], output_dir: str | Path, figures: bool = True) -> str:
    """
    Writes `report.json`, `report.md` and, with `figures`, `accuracy_temperature.png` (a panel per metric, Figure 8)
    and, for several benchmarks, `accuracy_temperature_by_benchmark.png` (Figure 7a).

    Returns:
        The Markdown.
    """
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    report = build_report(evaluations)
    markdown = render_markdown(report)
    write_json(output_dir / "report.json", report)
    if figures:
        markdown += "\n" + "\n".join(f"![{path.stem}]({path.name})" for path in _figures(report, output_dir)) + "\n"
    write_text(output_dir / "report.md", markdown)
    return markdown


def _figures(report: Mapping, output_dir: Path) -> list[Path]:
    from ..plotting import plot_accuracy_temperature

    def numeric(curves):
        return {name: {float(t): e for t, e in row.items() if _is_number(t)} for name, row in curves.items()}

    titles = {"avg@k": f"Avg@{report['k']}", "pass@k": f"Pass@{report['k']}", "pass@1": "Pass@1"}
    paths = [output_dir / "accuracy_temperature.png"]
    plot_accuracy_temperature({titles[m]: numeric(report["curves"][m]) for m in titles}, paths[0])
    if len(report["benchmarks"]) > 1:
        paths.append(output_dir / "accuracy_temperature_by_benchmark.png")
        panels = {f"{b}, Avg@{report['k']}": numeric(report["table2"][b]) for b in report["benchmarks"]}
        plot_accuracy_temperature(panels, paths[1])
    return paths


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
