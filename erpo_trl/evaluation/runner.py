"""Questions × temperatures → graded samples: in memory around training, or on disk and resumable."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..rewards import accuracy_reward, format_reward, last_boxed
from .benchmarks import Benchmark
from .metrics import summarize
from .sampling import Completion, Sampler, TransformersSampler, tokenize_questions
from .storage import cell_path, digest, is_finished, write_cell


def evaluate_model(
    model,
    tokenizer,
    rows: Iterable[Mapping],
    temperatures: Sequence[float] = (0.1, 0.6, 1.0, 1.5),
    k: int = 4,
    seed: int = 0,
    max_new_tokens: int = 256,
    batch_size: int = 256,
    chat_template_kwargs: dict | None = None,
) -> list[dict]:
    """
    Evaluates a model in memory, under the training prompt and the training rewards.

    Args:
        model: Causal LM; its mode and the global random states are left as they were.
        tokenizer: Its tokenizer.
        rows: With `question` and `answer` (gold), such as a `Dataset`.
        temperatures: 0 is greedy decoding, one sample per question.
        k: Samples per question.
        seed: Of each temperature.
        max_new_tokens: Tokens after which a completion is cut off.
        batch_size: Completions generated at once.
        chat_template_kwargs: For `apply_chat_template`.

    Returns:
        Per temperature, `metrics.summarize` of its samples with `temperature` and `k`.
    """
    rows = list(rows)
    sampler = TransformersSampler(model, tokenizer, batch_size)
    prompts = tokenize_questions(tokenizer, [row["question"] for row in rows], chat_template_kwargs)
    results = []
    for temperature in temperatures:
        samples = sample_cell(sampler, prompts, rows, temperature, k, seed, max_new_tokens)
        results.append({"temperature": temperature, "k": 1 if temperature == 0 else k, **summarize(samples)})
    return results


def run_evaluation(
    make_sampler: Callable[[], Sampler],
    tokenizer,
    benchmarks: Sequence[Benchmark],
    temperatures: Sequence[float],
    k: int,
    output_dir: str | Path,
    settings: Mapping | None = None,
    seed: int = 0,
    max_new_tokens: int = 3072,
    overwrite: bool = False,
    chat_template_kwargs: dict | None = None,
) -> None:
    """
    Evaluates to disk: each finished (benchmark, temperature) is there before the next starts, and is not made again.

    Args:
        make_sampler: Called when the first cell is to be sampled, so that a finished run loads no model.
        tokenizer: The model's.
        benchmarks: What to ask.
        temperatures: 0 is greedy decoding, one sample per question.
        k: Samples per question.
        output_dir: Gets `samples/<benchmark>_T<temperature>.parquet`.
        settings: What else identifies the run (model, back-end, …); stored with the samples, and compared on resuming.
        seed, max_new_tokens, chat_template_kwargs: As in `evaluate_model`.
        overwrite: Sample again what is there.

    Raises:
        ValueError: if a cell on disk was made with other settings and `overwrite` is not set.
    """
    todo = []
    for benchmark in benchmarks:
        prompts = tokenize_questions(tokenizer, [row["question"] for row in benchmark.rows], chat_template_kwargs)
        for temperature in temperatures:
            cell = dict(settings or {}) | {
                "benchmark": benchmark.name,
                "temperature": temperature,
                "k": 1 if temperature == 0 else k,
                "seed": seed,
                "max_new_tokens": max_new_tokens,
                "prompts": digest(prompts),
                "golds": digest([row["answer"] for row in benchmark.rows]),
                "questions": len(benchmark.rows),
                "without_gold": benchmark.without_gold,
                "repeated": benchmark.repeated,
            }
            path = cell_path(output_dir, benchmark.name, temperature)
            if overwrite or not is_finished(path, cell):
                todo.append((path, prompts, benchmark, cell))
    sampler = make_sampler() if todo else None
    for path, prompts, benchmark, cell in todo:
        samples = sample_cell(
            sampler, prompts, benchmark.rows, cell["temperature"], k, seed, max_new_tokens, benchmark.name
        )
        write_cell(path, samples, cell)
        cut = sum(s["truncated"] for s in samples)
        if cut:
            print(f"{path.stem}: {cut} of {len(samples)} completions cut off at {max_new_tokens} tokens.")


def sample_cell(
    sampler: Sampler,
    prompts: Sequence[list[int]],
    rows: Sequence[Mapping],
    temperature: float,
    k: int,
    seed: int,
    max_new_tokens: int,
    label: str = "sampling",
) -> list[dict]:
    """All questions at one temperature, sampled under a progress bar and graded: the samples that `metrics` takes."""
    n = 1 if temperature == 0 else k
    drawn: dict[int, list[Completion]] = {}
    with _progress() as progress:
        task = progress.add_task(f"{label}, T = {temperature:g}", total=len(prompts), speed=0.0)
        start, tokens = monotonic(), 0
        for i, completions in sampler.sample(
            prompts, n=n, temperature=temperature, seed=seed, max_new_tokens=max_new_tokens
        ):
            drawn[i] = completions
            tokens += sum(len(c.token_ids) for c in completions)
            progress.update(task, advance=1, speed=tokens / (monotonic() - start))
    return grade(rows, drawn)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )


def grade(rows: Sequence[Mapping], drawn: Mapping[int, list[Completion]]) -> list[dict]:
    """Verdicts of the training rewards on completions, one record per sample, in the order of the questions."""
    flat = [(i, j, c) for i in sorted(drawn) for j, c in enumerate(drawn[i])]
    texts = [c.text for _, _, c in flat]
    correct = accuracy_reward(completions=texts, solution=[rows[i]["answer"] for i, _, _ in flat])
    formatted = format_reward(completions=texts)
    return [
        {
            "question": i,
            "sample": j,
            "question_text": rows[i]["question"],
            "gold": rows[i]["answer"],
            "completion": completion.text,
            "answer": (last_boxed(completion.text) or "").strip() or None,
            "correct": verdict,
            "format": form,
            "tokens": len(completion.token_ids),
            "truncated": completion.truncated,
        }
        for (i, j, completion), verdict, form in zip(flat, correct, formatted, strict=True)
    ]
