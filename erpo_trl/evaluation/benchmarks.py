"""The benchmarks of section 5: where they are, and which columns hold question and gold answer."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Source:
    """
    A published data set and the meaning of its columns.

    Args:
        hub_id: Of the data set on the Hub.
        split: Evaluated split.
        question, answer: Columns; `answer` may hold a string, a number or a list of strings.
        config: Configuration (subset), where there are several.
        context: Column with text that precedes the question in some rows.
    """

    hub_id: str
    split: str
    question: str
    answer: str
    config: str | None = None
    context: str | None = None


# Questions: AIME 30 each, AMC 83 (AMC 12 of 2022 and 2023), MATH500 500, Minerva 272, OlympiadBench 674, of which the
# configuration is the open-ended (OE), text-only (TO) English competition mathematics.
SOURCES = {
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "problem", "answer"),
    "aime25": Source("math-ai/aime25", "test", "problem", "answer"),
    "amc": Source("AI-MO/aimo-validation-amc", "train", "problem", "answer"),
    "math500": Source("HuggingFaceH4/MATH-500", "test", "problem", "answer"),
    "minerva": Source("math-ai/minervamath", "test", "question", "answer"),
    "olympiadbench": Source(
        "Hothan/OlympiadBench", "train", "question", "final_answer", config="OE_TO_maths_en_COMP", context="context"
    ),
}
ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Benchmark:
    """
    Questions to evaluate on.

    Args:
        name: Short name, used in file names and tables.
        rows: `{"question": str, "answer": str}` each, in published order, repeated questions included.
        without_gold: Rows left out because they have no answer.
        repeated: Rows whose question occurred before.
    """

    name: str
    rows: list[dict[str, str]]
    without_gold: int = 0
    repeated: int = 0


def load_benchmark(name: str, data_dir: str | Path | None = None) -> Benchmark:
    """
    A benchmark by name.

    Args:
        name: One of `SOURCES`, or `arithmetic`, the held-out questions of the embedded default.
        data_dir: Folder with local copies: `<data_dir>/<name>` as downloaded from the Hub, or
            `<data_dir>/<name>.jsonl` with the same columns. By default the Hub is read.

    Raises:
        ValueError: for an unknown name, or columns that are not there.
        FileNotFoundError: if `data_dir` has no copy of it.
    """
    if name == ARITHMETIC:
        from ..tiny import load_arithmetic

        return make_benchmark(name, load_arithmetic("test"), "question", "answer")
    if name not in SOURCES:
        raise ValueError(
            f"Unknown benchmark {name!r}; use 'all', {', '.join(map(repr, [*SOURCES, ARITHMETIC]))}, or --benchmark "
            "file.jsonl for your own."
        )
    source = SOURCES[name]
    return make_benchmark(
        name, _load(source, name, data_dir), source.question, source.answer, source.context, source.hub_id
    )


def load_benchmark_file(path: str | Path, question: str = "question", answer: str = "answer") -> Benchmark:
    """
    A benchmark from a JSON-lines file, named after the file.

    Args:
        path: One JSON object a line.
        question, answer: Its keys.
    """
    from datasets import load_dataset

    if not Path(path).is_file():
        raise FileNotFoundError(
            f"--benchmark {path}: no such file; expected a .jsonl with '{question}' and '{answer}'."
        )
    rows = load_dataset("json", data_files=str(path), split="train")
    return make_benchmark(Path(path).stem, rows, question, answer, where=str(path))


def _load(source: Source, name: str, data_dir: str | Path | None):
    from datasets import load_dataset

    if data_dir is None:
        return load_dataset(source.hub_id, source.config, split=source.split)
    folder, file = Path(data_dir) / name, Path(data_dir) / f"{name}.jsonl"
    if file.is_file():
        return load_dataset("json", data_files=str(file), split="train")
    if not folder.is_dir():
        raise FileNotFoundError(
            f"No {folder} and no {file}; get a copy with: hf download --repo-type dataset {source.hub_id} "
            f"--local-dir {folder}"
        )
    return load_dataset(str(folder), source.config, split=source.split)


def make_benchmark(
    name: str, rows, question: str, answer: str, context: str | None = None, where: str | None = None
) -> Benchmark:
    """Rows of a data set as a `Benchmark`; the arguments are those of `Source`, `where` is named in errors."""
    kept, seen, without_gold, repeated = [], set(), 0, 0
    for i, row in enumerate(rows):
        if missing := {question, answer} - row.keys():
            raise ValueError(
                f"Row {i} of {where or name} has no column {', '.join(map(repr, sorted(missing)))}; it has "
                f"{', '.join(map(repr, row))}. Say which to use (--question_column, --answer_column), or rename."
            )
        text, gold = _question_text(row, question, context), gold_text(row[answer])
        if not text:
            raise ValueError(
                f"Row {i} of {where or name} has an empty question in column {question!r}; remove the row."
            )
        if gold is None:
            without_gold += 1
            continue
        repeated += text in seen
        seen.add(text)
        kept.append({"question": text, "answer": gold})
    if not kept:
        raise ValueError(f"{where or name} has no row with an answer in column {answer!r}.")
    return Benchmark(name, kept, without_gold, repeated)


def _question_text(row: Mapping, question: str, context: str | None) -> str:
    parts = [row.get(context) if context else None, row[question]]
    return "\n".join(part.strip() for part in parts if part and part.strip())


def gold_text(answer) -> str | None:
    """
    A published answer as one LaTeX string: `142.0` → `142` (AMC holds floats), `["$2$", "$3$"]` → `2, 3`
    (OlympiadBench holds lists of dollar-quoted LaTeX); `None` where there is none.
    """
    if isinstance(answer, list):
        parts = [part for part in map(gold_text, answer) if part is not None]
        return ", ".join(parts) or None
    if answer is None:
        return None
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return re.sub(r"(?<!\\)\$", "", str(answer)).strip() or None
