"""
What goes to the Hub: a model's card from what really ran, a scored dataset's card, and which files are uploaded.

Works on plain values and `huggingface_hub`'s cards; the trainers and the recipes call it. A name that can't be told to
be the Hub's own is left out of the metadata: a path of this machine is nobody else's business.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import DatasetCard, EvalResult, HfApi, ModelCard, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id


PUBLISHED_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "*adapter_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer*",
    "chat_template*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*processor_config.json",
    "*.py",  # a model with code of its own
    "*.png",
    "before_after.json",
)
"""Patterns of the files of a run folder that are uploaded; `checkpoint-*` folders never are."""

PRIVATE_FILES = ("training_args.bin", "README.md", "*.tfevents.*")
"""Left out of the resumable checkpoints of `hub_strategy="checkpoint"`, which are uploaded whole otherwise."""

SCORE_MEANINGS = {
    "ref_query_logps": "list of float32, nats: log P(x_t \\| x_<t) of each scored token under the reference",
    "ref_query_logp": "float32, nats: their sum ℓ, the log-likelihood of the query",
    "query_weight": "float32: w = clip(s̄ / s), s = -ℓ, s̄ its mean over the training set; multiplies the advantages",
    "ref_query_id": "string, JSON: how the row was scored, the same in all rows",
}

IDENTITY_MEANINGS = {
    "model": "the reference: its Hub id and commit, or a hash of its weights and config",
    "tokenizer": "hash of tokenizer, chat template, its options and tools",
    "dtype": "in which the reference computed",
    "temperature": "of the softmax; the trainer's sampling temperature must be the same",
    "scope": "`query`: without the template common to all prompts; `prompt`: all of it",
    "weight_min": "lower clip of the weight",
    "weight_max": "upper clip of the weight",
    "start": "tokens before the scored span",
    "end": "tokens after it",
    "mean_nll": "s̄, nats",
    "weight_normalized": "whether the clipped weights are divided by their mean",
    "weight_mean": "what the clipped weights are divided by",
}


def hub_repo(name: str | None) -> str | None:
    """`name` if it can be a Hub id and is nothing on this machine, else `None`."""
    try:
        validate_repo_id(name or "")
    except HFValidationError:
        return None
    return None if not name or os.path.exists(name) else name


def hub_model(name: str | None, revision: str | None = None, cache_dir: str | None = None) -> tuple[str, str] | None:
    """
    Hub id and commit of a model that was loaded from there.

    Args:
        name: As given to `from_pretrained`.
        revision: Likewise; `None` is `main`.
        cache_dir: Likewise.

    Returns:
        `(id, commit)`, or `None` if the Hub cache does not have it: it was a folder, or was never loaded by name.
    """
    if hub_repo(name) is None:
        return None
    config = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    return (name, Path(config).parent.name) if isinstance(config, str) else None


def markdown_table(header: Sequence[str], rows: Sequence[Sequence]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


# A model's card


def complete_model_card(
    card: ModelCard,
    rows: Mapping[str, object],
    base_model: tuple[str, str] | None,
    dataset: str | None,
    is_adapter: bool,
    evaluations: Sequence[tuple[str, list[EvalResult]]] = (),
) -> ModelCard:
    """
    TRL's card of a trained model with what it does not know.

    Args:
        card: As TRL writes it.
        rows: The lines of the "Query-side regularization" table.
        base_model: Hub id and commit; `None` for a model that is not on the Hub.
        dataset: Hub id of the training set, if it has one.
        is_adapter: Whether the folder holds an adapter and not a whole model.
        evaluations: As [`before_after_evaluation`] and [`report_evaluation`] return them.

    Returns:
        The same card: metadata with `base_model`, `datasets`, `library_name`, `pipeline_tag`, `tags`, and with results
        `model-index`.
    """
    data = card.data
    data.base_model, data.datasets = base_model and base_model[0], dataset
    data.library_name, data.pipeline_tag = "peft" if is_adapter else "transformers", "text-generation"
    data.tags = sorted({*(data.tags or []), *(["lora"] if is_adapter else [])})
    data.pop("licence", None)  # TRL's placeholder, no key of the Hub's
    was = r"is a fine-tuned version of \[[^\]]*\]\(https://huggingface\.co/[^)]*\)"
    origin = "is a fine-tuned version of a model that is not on the Hub"
    if base_model:
        origin = "is a fine-tuned version of [{0}](https://huggingface.co/{0}) (revision `{1}`)".format(*base_model)
    card.text = re.sub(was, lambda _: origin, card.text, count=1)
    card.text = card.text.replace('model="None"', f'model="{data.model_name}"')
    section = "### Query-side regularization\n\n" + markdown_table(["", ""], list(rows.items()))
    card.text = with_section(card.text, "query-side", section)
    return with_evaluations(card, evaluations)


def with_evaluations(card: ModelCard, evaluations: Sequence[tuple[str, list[EvalResult]]]) -> ModelCard:
    """The card with these results in its text and metadata, in the place of those it had."""
    if not evaluations:
        return card
    tables = "\n\n".join(table for table, _ in evaluations)
    card.text = with_section(card.text, "evaluation", f"### Evaluation\n\n{tables}")
    card.data.eval_results = [result for _, results in evaluations for result in results]
    return card


def with_section(text: str, name: str, body: str) -> str:
    """`text` with a section between two comments that name it: in the place of the old one, else before the end."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
    block = f"{start}\n{body.strip()}\n\n{end}"
    if start in text:
        before, _, rest = text.partition(start)
        return before + block + rest.partition(end)[2]
    before, marker, after = text.partition("### Framework versions")
    return f"{before}{block}\n{marker}{after}"


def before_after_evaluation(results: Mapping) -> tuple[str, list[EvalResult]]:
    """
    The table of `recipes/train_math.py` for the card.

    Args:
        results: What `before_after.json` holds: `benchmark`, `before` and `after`, both as `evaluate_model` returns.

    Returns:
        Markdown, and a result per temperature and metric of the trained model (accuracy, 0 … 1).
    """
    name, rows, found = results["benchmark"], [], []
    for old, new in zip(results["before"], results["after"], strict=True):
        rows.append([f"{new['temperature']:g}", *(_value(row, m) for m in ("avg@k", "pass@k") for row in (old, new))])
        for metric in ("avg@k", "pass@k"):
            title = f"{metric.replace('k', str(new['k'])).capitalize()} at T = {new['temperature']:g}"
            found.append(_result(name, title, new[metric]))
    k = results["after"][-1]["k"]
    header = ["temperature", *(f"{m}@{k} {when}" for m in ("Avg", "Pass") for when in ("before", "after"))]
    intro = f"{name}, {results['after'][0]['questions']} questions, {k} samples each, before and after training"
    return f"{intro}; brackets hold 95 % bootstrap intervals.\n\n{markdown_table(header, rows)}", found


def _value(row: Mapping, metric: str) -> str:
    low, high = row[f"{metric}_interval"]
    return f"{row[metric]:.3f} [{low:.3f}, {high:.3f}]"


def report_evaluation(report: Mapping, model: str | None = None) -> tuple[str, list[EvalResult]]:
    """
    The report of `recipes/evaluate.py` for the card.

    Args:
        report: What its `report.json` holds.
        model: Which of the report's models the card is of; not needed where there is one.

    Returns:
        Markdown, and a result per benchmark and metric (accuracy, 0 … 1).

    Raises:
        `ValueError`: several models, and `model` is none of them.
    """
    names = report["models"]
    if model is None and len(names) == 1:
        model = names[0]
    if model not in names:
        raise ValueError(f"The report is of the models {', '.join(names)}: pass `model=` one of them, got {model!r}.")
    titles = {m: m.replace("k", str(report["k"])).capitalize() for m in ("avg@k", "pass@k", "pass@1")}
    temperatures = ", ".join(f"{t:g}" for t in report["temperatures"])
    rows, found = [], []
    for benchmark in [*report["benchmarks"], *(["average"] if len(report["benchmarks"]) > 1 else [])]:
        estimates = {metric: report["table1"][metric][model][benchmark] for metric in titles}
        rows.append([benchmark, *(_estimate(estimate) for estimate in estimates.values())])
        if benchmark != "average":
            found += [
                _result(benchmark, f"{titles[metric]}, mean over T = {temperatures}", estimate[0])
                for metric, estimate in estimates.items()
            ]
    table = markdown_table(["benchmark", *titles.values()], rows)
    return f"Means over the temperatures {temperatures}; brackets hold 95 % bootstrap intervals.\n\n{table}", found


def _estimate(estimate: Sequence[float | None]) -> str:
    value, low, high = estimate
    return f"{value:.3f}" if low is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def _result(benchmark: str, metric: str, value: float) -> EvalResult:
    from .evaluation.benchmarks import SOURCES

    return EvalResult(
        task_type="text-generation",
        dataset_type=SOURCES[benchmark].hub_id if benchmark in SOURCES else benchmark,
        dataset_name=benchmark,
        metric_type="accuracy",
        metric_name=metric,
        metric_value=round(value, 4),
    )


def find_evaluations(folder: str | Path) -> list[tuple[str, list[EvalResult]]]:
    """
    The evaluations in a run folder: `before_after.json`, and `evaluation/report.json`, where
    `recipes/evaluate.py --model <folder> --output_dir <folder>/evaluation` puts it.
    """
    sources = {"before_after.json": before_after_evaluation, "evaluation/report.json": report_evaluation}
    paths = {Path(folder) / name: read for name, read in sources.items()}
    return [read(json.loads(path.read_text("utf-8"))) for path, read in paths.items() if path.is_file()]


# Uploads


def check_adapter_base(base_model: str | None) -> None:
    """
    Raise for an adapter whose base model nobody else has.

    Args:
        base_model: The adapter's `base_model_name_or_path`.

    Raises:
        `ValueError`: it is not on the Hub: the adapter could not be loaded from there, and its `adapter_config.json`
        would publish a path of this machine.
    """
    if hub_repo(base_model) is None:
        raise ValueError(
            f"This adapter's base model, {base_model!r}, is not on the Hub, so that nobody could load the adapter "
            "from there. Push the base model first and train from its Hub id, or publish the whole model: "
            "`trainer.model.merge_and_unload().push_to_hub(...)`."
        )


@contextmanager
def only_published_files(api: HfApi) -> Iterator[None]:
    """
    Uploads of the HF Trainer without what is nobody else's business, for the duration of the context.

    The Trainer uploads all of its output folder but the checkpoints. In it, `training_args.bin` holds `hub_token` and
    absolute paths, TensorBoard's files hold the latter and the host's name.

    Args:
        api: The object whose `upload_folder` the Trainer calls.
    """
    upload = api.upload_folder

    def upload_folder(**options):
        if "path_in_repo" in options:  # hub_strategy="checkpoint": a resumable checkpoint was asked for
            return upload(**options | {"ignore_patterns": [*options.get("ignore_patterns", []), *PRIVATE_FILES]})
        return upload(**options | {"allow_patterns": list(PUBLISHED_FILES)})

    api.upload_folder = upload_folder
    try:
        yield
    finally:
        del api.upload_folder


def push_folder(folder: str | Path, repo_id: str, **options) -> str:
    """
    Publish a trained model's folder as it is, with the evaluations found in it on its card.

    Args:
        folder: The `output_dir` of a run, with its card.
        repo_id: Where to, `user/name`; made if it is not there.
        options: For `HfApi.create_repo`, such as `private` and `token`.

    Returns:
        The model's address.

    Raises:
        `FileNotFoundError`: a folder without a card. `ValueError`: an adapter on a model that is not on the Hub.
    """
    folder, token = Path(folder), options.get("token")
    path = folder / "README.md"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no README.md: give the `output_dir` of a training run.")
    for adapter in folder.glob("adapter_config.json"):
        check_adapter_base(json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"])
    card = ModelCard.load(path)
    card.data.model_name = card.data.get("model_name") or repo_id.split("/")[-1]
    with_evaluations(card, find_evaluations(folder)).save(path)
    api = HfApi()
    url = api.create_repo(repo_id, exist_ok=True, **options)
    api.upload_folder(
        repo_id=repo_id,
        folder_path=folder,
        allow_patterns=list(PUBLISHED_FILES),
        ignore_patterns=["_*", "checkpoint-*"],
        commit_message="Upload model",
        token=token,
    )
    return str(url)


# A scored dataset


def scored_dataset_card(dataset, source: str | None = None, card: DatasetCard | None = None) -> DatasetCard:
    """
    The card of a dataset that [`score_queries`] made: what its columns mean, and what its scores may be used for.

    Args:
        dataset (`Dataset` or `DatasetDict`):
            With the score columns.
        source (`str`, *optional*):
            Hub id of the dataset that the prompts come from.
        card (`DatasetCard`, *optional*):
            A card to add this to, such as the one `push_to_hub` writes; its metadata is kept.

    Returns:
        `DatasetCard`

    Raises:
        `ValueError`: no score columns.
    """
    splits = dataset if isinstance(dataset, Mapping) else {"": dataset}
    columns = list(next(iter(splits.values())).features)
    missing = [column for column in SCORE_MEANINGS if column not in columns]
    if missing:
        raise ValueError(
            f"The dataset has no column {', '.join(missing)}: score it, `erpo_trl.score_queries(dataset, model)`."
        )
    identity = json.loads(next(iter(next(iter(splits.values()))))["ref_query_id"])
    card = card or DatasetCard("---\n{}\n---\n")
    card.data.tags = sorted({*(card.data.get("tags") or []), "erpo", "trl"})
    card.data.task_categories = ["text-generation"]
    if hub_repo(source):
        card.data.source_datasets = [source]
    card.text = with_section(card.text, "scores", _scores_text(identity, splits, columns, hub_repo(source)))
    return card


def _scores_text(identity: dict, splits: Mapping, columns: Sequence[str], source: str | None) -> str:
    prompts = f"the prompts of [{source}](https://huggingface.co/datasets/{source})" if source else "prompts"
    counts = ", ".join(f"{len(split):,} {name}".strip() for name, split in splits.items())
    others = [column for column in columns if column not in SCORE_MEANINGS]
    model = identity["model"].partition("+")[0]
    reference = "a reference model that is known by its hash"
    if "@" in model:
        name, _, commit = model.partition("@")
        reference = f"[{name}](https://huggingface.co/{name}/tree/{commit})"
    values = [[f"`{key}`", f"`{value}`", IDENTITY_MEANINGS.get(key, "")] for key, value in identity.items()]
    return "\n\n".join(
        [
            f"# Scored prompts\n\nRows ({counts}): {prompts}, scored under {reference} for ERPO "
            "([arXiv 2608.23311](https://arxiv.org/abs/2608.23311)) by `erpo_trl.score_queries`.",
            "## Columns",
            markdown_table(["column", "what it holds"], [[f"`{c}`", text] for c, text in SCORE_MEANINGS.items()]),
            f"From the dataset itself: {', '.join(f'`{column}`' for column in others)}.",
            "## How the rows were scored",
            markdown_table(["`ref_query_id`", "value", "meaning"], values),
            "## Use\n\n`ERPOTrainer` takes the rows as they are and makes no forward to score them, if its model, "
            "tokenizer, chat template, temperature, scope and clip range are those above; otherwise it says what "
            "differs.\n\n```python\nfrom datasets import load_dataset\nfrom erpo_trl import ERPOTrainer\n\n"
            'trainer = ERPOTrainer(model, reward_funcs, args, load_dataset("<this dataset>", split="train"))\n```',
        ]
    )


def push_scored(dataset, repo_id: str, source: str | None = None, token: str | None = None, **options) -> None:
    """
    Publish a scored dataset (parquet, by `dataset.push_to_hub`) with its card.

    Args:
        dataset (`Dataset` or `DatasetDict`):
            With the score columns.
        repo_id (`str`):
            Where to, `user/name`.
        source (`str`, *optional*):
            Hub id of the dataset that the prompts come from.
        token (`str`, *optional*):
            Instead of the one that is logged in.
        options:
            For `push_to_hub`, such as `private`.

    Raises:
        `ValueError`: no score columns.
    """
    scored_dataset_card(dataset, source)  # before anything is uploaded
    dataset.push_to_hub(repo_id, token=token, **options)
    card = DatasetCard.load(repo_id, token=token)  # with the features and the files that `datasets` put there
    scored_dataset_card(dataset, source, card).push_to_hub(repo_id, token=token)
