"""
The paper's prompt, and dataset rows turned into trainer rows: `prompt` (messages), `solution` (the gold answer, as the
rewards get it) and `question`.

    dataset, reports = load_math(tokenizer=tokenizer, max_prompt_length=1024)
    print(*reports, sep="\\n")
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Value, concatenate_datasets, load_dataset, load_from_disk


# Appendix A of arXiv 2608.23311, one user turn; `{question}` is the stripped question.
MATH_PROMPT = (
    "{question} You FIRST think about the reasoning process as an internal monologue and then provide the final"
    " answer. The reasoning process MUST BE enclosed within <think> </think> tags."
    " The final answer MUST BE put in \\boxed{{}}."
)

# MATH (12,500 problems) split into 12,000 (`train`) and the 500 of MATH500 (`test`); columns problem, solution,
# answer, subject, level, unique_id. The split that MATH was published with trains on 7,500 only.
MATH_DATASET = "nlile/hendrycks-MATH-benchmark"
MATH500_DATASET = "HuggingFaceH4/MATH-500"  # one split, `test`; the same columns

QUESTION_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "solution")
FILE_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class FilterReport:
    """What one filter did; `str()` of it is the line that a recipe prints."""

    name: str
    kept: int
    dropped: int
    why: str

    def __str__(self) -> str:
        return f"{self.name}: kept {self.kept:,}, dropped {self.dropped:,} ({self.why})"


def to_messages(question: str) -> list[dict[str, str]]:
    """The question under the paper's prompt (Appendix A), as a conversation of one user turn."""
    return [{"role": "user", "content": MATH_PROMPT.format(question=question.strip())}]


def load_math(
    name: str = MATH_DATASET,
    split: str = "train",
    min_level: int = 3,
    held_out: Mapping[str, Iterable[str]] | None = None,
    **options,
) -> tuple[Dataset, list[FilterReport]]:
    """
    The paper's training set: MATH levels 3 to 5 without MATH500 (Section 5.1; about 8.5K problems).

    Args:
        name (`str`, defaults to `"nlile/hendrycks-MATH-benchmark"`):
            Hub id, folder or file with MATH's columns (`problem`, `level`, `solution` and perhaps `answer`).
        held_out (`Mapping[str, Iterable[str]]`, *optional*):
            Name and questions of each evaluation set. `None`: MATH500, from the Hub.
        split, min_level, options:
            As [`load_prompts`] has them; the highest level is 5.
    """
    if held_out is None:
        held_out = {"MATH500": load_questions(MATH500_DATASET, "test")}
    return load_prompts(name, split, min_level=min_level, held_out=held_out, **options)


def load_prompts(
    name: str,
    split: str = "train",
    config: str | None = None,
    min_level: int = 0,
    **options,
) -> tuple[Dataset, list[FilterReport]]:
    """
    Any question-and-answer dataset as trainer rows.

    Args:
        name (`str`):
            Hub id, folder (of data files, or written by `save_to_disk`) or file (.jsonl, .json, .csv, .parquet).
        split (`str`, defaults to `"train"`), config (`str`, *optional*):
            Which part of it.
        min_level (`int`, defaults to `0`):
            Keep only rows whose `level` (`3` or `"Level 3"`) is at least this. `0`: no such filter.
        options:
            As [`prepare_rows`] has them.

    Returns:
        `tuple[Dataset, list[FilterReport]]`: see [`prepare_rows`].

    Raises:
        FileNotFoundError, ValueError: nothing could be read under that name; and as [`prepare_rows`].
    """
    dataset = read_dataset(name, split, config)
    if min_level == 0:
        return prepare_rows(dataset, **options)
    require_column(dataset, "level", "Type --min_level 0 to keep rows of every level")
    dataset, report = keep_levels(dataset, min_level)
    dataset, reports = prepare_rows(dataset, **options)
    return dataset, [report, *reports]


def load_questions(name: str, split: str = "test", question_column: str | None = None) -> list[str]:
    """The questions of a dataset, such as an evaluation set to be held out (arguments as [`load_prompts`])."""
    dataset = read_dataset(name, split)
    return questions_and_prompts(dataset, find_question_column(dataset, question_column))[0]


def read_dataset(name: str, split: str, config: str | None = None) -> Dataset:
    """One split of a Hub dataset, a folder or a file (arguments and errors as [`load_prompts`])."""
    path = Path(name).expanduser()
    if not path.exists() and (path.is_absolute() or name.startswith(".") or path.suffix in FILE_BUILDERS):
        raise FileNotFoundError(
            f"There is no file or folder {name!r}. Type --dataset_name <a Hub id, a folder, or a file ending in "
            f"{', '.join(FILE_BUILDERS)}>."
        )
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return pick_split(load_from_disk(str(path)), name, split)
    try:
        if path.is_file():
            # A file has no splits: `datasets` calls all of it "train".
            return load_dataset(FILE_BUILDERS.get(path.suffix, "json"), data_files=str(path), split="train")
        return load_dataset(str(path) if path.is_dir() else name, config, split=split)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"Could not read the split {split!r} of {name!r}: {error} Type --dataset_name <a Hub id, a folder or a "
            "file>, --dataset_train_split <a split of it> and, where it has several, --dataset_config <one of them>."
        ) from error


def pick_split(dataset: Dataset | DatasetDict, name: str, split: str) -> Dataset:
    """The split of a dataset that was saved with splits; a dataset saved without is all there is."""
    if isinstance(dataset, Dataset):
        return dataset
    if split not in dataset:
        raise ValueError(f"{name!r} has no split {split!r}. Type --dataset_train_split <{' or '.join(dataset)}>.")
    return dataset[split]


def prepare_rows(
    dataset: Dataset,
    question_column: str | None = None,
    answer_column: str | None = None,
    held_out: Mapping[str, Iterable[str]] | None = None,
    tokenizer: Any = None,
    max_prompt_length: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[Dataset, list[FilterReport]]:
    """
    Turn rows of questions and answers into trainer rows, and drop those that can't be trained on or must not be.

    A question is put under the paper's prompt. A `prompt` column that already holds messages is left as it is, so that
    rows this function made, or that were scored afterwards, pass unchanged.

    Args:
        dataset (`Dataset`):
            The rows; other columns than those named here are kept.
        question_column (`str`, *optional*):
            Where the question is. `None`: messages in `prompt`, else the first there is of problem, question, prompt.
        answer_column (`str`, *optional*):
            Where the gold is: what the last balanced `\\boxed{}` holds, else what follows GSM8K's `####`, else all of
            it. `None`: `answer`, else `solution`, which beside a plain question is a derivation, so that only its
            last `\\boxed{}` counts.
        held_out (`Mapping[str, Iterable[str]]`, *optional*):
            Name and questions of each evaluation set; a row that asks one of them (up to whitespace) is dropped.
        tokenizer (`PreTrainedTokenizerBase`, *optional*), max_prompt_length (`int`, *optional*):
            Drop rows whose prompt, with chat template and generation prompt, has more tokens. `None`: keep all.
        chat_template_kwargs (`Mapping`, *optional*):
            What else the trainer's config passes to the chat template.

    Returns:
        `tuple[Dataset, list[FilterReport]]`: the rows, in their order, and a report for each filter.

    Raises:
        ValueError: a column is missing or is not text, there is a length but no tokenizer, or no row is left.
    """
    if max_prompt_length is not None and tokenizer is None:
        raise ValueError("`max_prompt_length` counts tokens: pass the `tokenizer` that the trainer will use.")
    question_column = find_question_column(dataset, question_column)
    questions, prompts = questions_and_prompts(dataset, question_column)
    answer_column, boxed_only = find_answer_column(dataset, question_column, answer_column)
    golds = [gold_of(answer, boxed_only) for answer in dataset[answer_column]]
    keys = [normalize(question) for question in questions]

    rows, reports = list(range(len(dataset))), []

    def keep(name, test, why):
        kept = [i for i in rows if test(i)]
        reports.append(FilterReport(name, len(kept), len(rows) - len(kept), why))
        rows[:] = kept

    keep("questions", lambda i: keys[i], f"no text in {question_column!r}")
    keep("golds", lambda i: golds[i], f"no {'balanced boxed ' if boxed_only else ''}answer in {answer_column!r}")
    first = {}
    for i in rows:
        first.setdefault(keys[i], i)
    clashes = sum(golds[i] != golds[first[keys[i]]] for i in rows)
    keep("duplicates", lambda i: first[keys[i]] == i, f"asked in an earlier row, {clashes:,} with another gold")
    for name, held_out_questions in (held_out or {}).items():
        held_out_keys = set(map(normalize, held_out_questions))
        keep(f"held out: {name}", lambda i, seen=held_out_keys: keys[i] not in seen, "asked in that evaluation set")
    if max_prompt_length is not None:
        lengths = prompt_lengths(prompts, tokenizer, chat_template_kwargs)
        keep("prompt length", lambda i: lengths[i] <= max_prompt_length, f"more than {max_prompt_length:,} tokens")
    if not rows:
        raise ValueError("No row is left to train on:\n" + "\n".join(map(str, reports)))
    columns = {"prompt": prompts, "solution": golds, "question": questions}
    return with_columns(dataset.select(rows), {k: [v[i] for i in rows] for k, v in columns.items()}), reports


def with_columns(dataset: Dataset, columns: Mapping[str, list]) -> Dataset:
    """These columns, then the dataset's others."""
    new, rest = Dataset.from_dict(dict(columns)), dataset.remove_columns(set(columns) & set(dataset.column_names))
    return concatenate_datasets([new, rest], axis=1) if rest.column_names else new


def keep_levels(dataset: Dataset, min_level: int) -> tuple[Dataset, FilterReport]:
    """The rows whose `level`, `3` or `"Level 3"`, is at least this; MATH also has a few `"Level ?"`, never kept."""
    levels = [re.search(r"\d+", str(level)) for level in dataset["level"]]
    rows = [i for i, level in enumerate(levels) if level and int(level[0]) >= min_level]
    report = FilterReport("levels", len(rows), len(dataset) - len(rows), f"below level {min_level}")
    return dataset.select(rows), report


def normalize(question: str) -> str:
    """The question with each run of whitespace a single space: what makes two of them the same."""
    return " ".join(question.split())


def gold_of(answer: Any, boxed_only: bool) -> str | None:
    """The gold answer in a cell, or `None`: see `answer_column` of [`prepare_rows`]."""
    from erpo_trl.rewards import last_boxed

    text = "" if answer is None else str(answer)
    if boxed_only or "\\boxed" in text:
        text = last_boxed(text) or ""
    return text.rpartition("####")[2].strip() or None


def questions_and_prompts(dataset: Dataset, question_column: str) -> tuple[list[str], list[list[dict[str, str]]]]:
    """Per row the bare question and the messages; of messages, the question is `question`, else the last user turn."""
    cells = dataset[question_column][:]
    if not holds_messages(dataset, question_column):
        questions = ["" if cell is None else cell for cell in cells]
        return questions, [to_messages(question) for question in questions]
    if "question" in dataset.column_names:
        return dataset["question"][:], cells
    return [next((m["content"] for m in reversed(cell) if m["role"] == "user"), "") for cell in cells], cells


def find_question_column(dataset: Dataset, given: str | None) -> str:
    """The column of the question (see [`prepare_rows`]); it must hold text or messages."""
    if given is None and holds_messages(dataset, "prompt"):
        return "prompt"
    column = given or next((name for name in QUESTION_COLUMNS if name in dataset.column_names), "question")
    require_column(dataset, column, "Type --question_column <the one with the question>")
    holds_text = dataset.features[column] in (Value("string"), Value("large_string"))
    if not holds_text and not holds_messages(dataset, column):
        raise ValueError(
            f"The column {column!r} holds {dataset.features[column]}, expected text or messages. "
            "Type --question_column <the one with the question>."
        )
    return column


def find_answer_column(dataset: Dataset, question_column: str, given: str | None) -> tuple[str, bool]:
    """The column of the answer (see [`prepare_rows`]), and whether only a box in it counts."""
    names = dataset.column_names
    messages = holds_messages(dataset, question_column)
    prepared = messages and "question" in names  # by this module: `solution` is the gold, `answer` what it came from
    order = reversed(ANSWER_COLUMNS) if prepared else ANSWER_COLUMNS
    column = given or next((name for name in order if name in names), "answer")
    require_column(dataset, column, "Type --answer_column <the one with the answer>")
    # Beside messages, `solution` is the gold, as trainers and rewards know it.
    return column, given is None and column == "solution" and not messages


def require_column(dataset: Dataset, column: str, what_to_type: str) -> None:
    if column not in dataset.column_names:
        raise ValueError(f"No column {column!r}; there are: {', '.join(dataset.column_names)}. {what_to_type}.")


def holds_messages(dataset: Dataset, column: str) -> bool:
    """Whether the column's cells are conversations: lists of dicts with `role` and `content`."""
    inner = getattr(dataset.features.get(column), "feature", None)
    return isinstance(inner, dict) and {"role", "content"} <= inner.keys()


def prompt_lengths(
    prompts: Sequence[list[dict[str, str]]], tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None
) -> list[int]:
    """Tokens of each prompt as the trainer feeds it: chat template and generation prompt."""
    lengths = []
    for start in range(0, len(prompts), 1000):
        tokenized = tokenizer.apply_chat_template(
            prompts[start : start + 1000],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            **(chat_template_kwargs or {}),
        )
        lengths += map(len, tokenized["input_ids"])
    return lengths
