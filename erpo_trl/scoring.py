"""
Reference scores of the prompts: `ℓ_θ0` once over the training set, before RL, cached, constant (arXiv 2608.23311, §4).

[`score_queries`] is the `datasets` preprocessing step; the trainers run the same [`QueryScorer`] when a dataset comes
without scores.
"""

import copy
import json
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import torch
import xxhash
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from huggingface_hub import try_to_load_from_cache
from torch import nn
from tqdm.auto import tqdm

from .query_likelihood import (
    QuerySpan,
    common_span,
    evaluation_mode,
    fused_lm_head,
    preserved_random_states,
    prompt_tokenizer,
    score_token_ids,
    trainer_chat_template,
)
from .query_weight import query_weight
from .vllm_scoring import vllm_reference


logger = datasets.utils.logging.get_logger(__name__)

SCORE_COLUMNS = ["ref_query_logps", "ref_query_logp", "query_weight", "ref_query_id"]


@dataclass(frozen=True)
class ScoreIdentity:
    """How a row was scored; its JSON form is the `ref_query_id` column. `start`, `end`: see [`QuerySpan`]."""

    model: str
    tokenizer: str
    dtype: str
    temperature: float
    scope: str
    weight_min: float
    weight_max: float
    start: int | None = None  # the training set sets what is None
    end: int | None = None
    mean_nll: float | None = None
    weight_normalized: bool = False
    weight_mean: float | None = 1.0  # what the clipped weights are divided by: 1, or their mean to normalize them

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> "ScoreIdentity":
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`ref_query_id` is not one that this version of erpo_trl writes: {text!r}. Score the dataset again "
                "with `erpo_trl.score_queries`."
            ) from error

    @property
    def span(self) -> QuerySpan:
        return QuerySpan(self.start, self.end)

    def scores_key(self) -> str:
        """Names everything that a cached log-prob depends on, but for the prompt itself."""
        fields = {k: v for k, v in asdict(self).items() if k != "mean_nll" and not k.startswith("weight_")}
        return _digest(json.dumps(fields, sort_keys=True).encode())


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class ScoreCache:
    """
    Log-probs by prompt, in a folder of parts. A part is written under a temporary name and renamed, so that a killed
    run leaves only whole ones, and the next goes on from there.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def load(self) -> dict[bytes, np.ndarray]:
        scores = {}
        for part in self.folder.glob("*.npz"):
            try:
                with np.load(part) as arrays:
                    splits = np.split(arrays["logps"], np.cumsum(arrays["lengths"])[:-1])
                    scores |= dict(zip(map(bytes, arrays["keys"]), splits, strict=True))
            except FileNotFoundError:  # another process has just compacted the folder
                continue
            except Exception as error:  # zipfile, zlib and numpy have each their own for a damaged file
                logger.warning(f"The score file {part} is damaged ({error!r}): its prompts are scored again.")
        return scores

    def add(self, scores: dict[bytes, np.ndarray]) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f"{uuid.uuid4().hex}.npz"
        with open(part.with_suffix(".tmp"), "wb") as file:
            np.savez(
                file,
                keys=np.frombuffer(b"".join(scores), dtype=np.uint8).reshape(len(scores), -1),
                lengths=np.array([len(logps) for logps in scores.values()]),
                logps=np.concatenate(list(scores.values())),
            )
        os.replace(file.name, part)
        return part

    def compact(self):
        """Merge the parts into one."""
        parts = list(self.folder.glob("*.npz"))
        if len(parts) > 1:
            self.add(self.load())
            for part in parts:
                part.unlink(missing_ok=True)


def default_cache_dir() -> Path:
    """`$ERPO_TRL_CACHE`, or a folder in the `datasets` cache."""
    return Path(os.environ.get("ERPO_TRL_CACHE", Path(datasets.config.HF_DATASETS_CACHE) / "erpo_trl"))


class QueryScorer:
    """
    Scores datasets under one reference. The first one scored sets the span and the mean (the training set); the
    others take them over.

    Args:
        reference (`Callable`):
            Returns a context manager over `score(prompts, span)`, [`score_token_ids`] under the reference. Only
            entered when there is something to score.
        tokenize (`Callable`):
            Prompts (strings or conversations) to lists of token ids, as the trainer does it.
        identity (`ScoreIdentity`):
            Its span, mean and weight mean may be `None`: then the first dataset scored sets them.
        max_length (`int`, *optional*):
            The model's number of positions.
        batch_tokens (`int`):
            Padded tokens per forward.
        cache_dir (`Path`, *optional*):
            Defaults to [`default_cache_dir`].
        main_process_only (`bool`):
            Whether the other processes have no reference to score with.
    """

    def __init__(
        self,
        reference: Callable[[], AbstractContextManager],
        tokenize: Callable[[list], list[list[int]]],
        identity: ScoreIdentity,
        max_length: int | None = None,
        batch_tokens: int = 4096,
        cache_dir: str | Path | None = None,
        main_process_only: bool = False,
    ):
        self.reference = reference
        self.tokenize = tokenize
        self.identity = identity
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self.cache_dir = Path(cache_dir) if cache_dir is not None else default_cache_dir()
        self.main_process_only = main_process_only
        self._known = (None, {})  # (scores_key, scores): the cache in memory

    def score(self, dataset: Dataset, name: str = "train") -> Dataset:
        """`dataset` with the score columns; old ones are replaced, rows and their order are kept."""
        dataset = dataset.remove_columns([column for column in SCORE_COLUMNS if column in dataset.column_names])
        _check_columns(dataset.column_names, name)
        prompts = self._token_ids(dataset, name)
        if self.identity.start is None:
            self._fit_span(prompts, name)
        logps = self._logps(prompts, name)
        totals = _totals(logps)
        self._fit_weight(totals)
        columns = self._columns(logps, totals)
        fingerprint = _digest(f"{dataset._fingerprint} {self.identity}".encode())
        scores = Dataset(datasets.table.InMemoryTable(columns), fingerprint=fingerprint)
        scored = datasets.concatenate_datasets([dataset, scores], axis=1, split=dataset.split)
        kept = dataset.format  # dropped by the concatenation
        if kept["type"] is not None:
            columns = [*kept["columns"], *SCORE_COLUMNS]
            scored.set_format(kept["type"], columns, kept["output_all_columns"], **kept["format_kwargs"])
        return scored

    def score_stream(self, dataset: IterableDataset, name: str = "train") -> IterableDataset:
        """`dataset` with the score columns, scored as it is read, by the process that reads it."""

        if None in (self.identity.start, self.identity.mean_nll, self.identity.weight_mean):
            raise ValueError(
                f"The {name} dataset is iterable, so that the span of the query and the mean over the training set "
                "can't be found in it: pass `span=(start, end)` (or `query_scope='prompt'`) and `mean_nll=...`, from "
                "the `ref_query_id` of a scored sample, without `normalize_weight`."
            )

        def add_scores(batch: dict, indices: list[int]) -> dict:
            _check_columns(list(batch), name)
            prompts = self._checked(batch["prompt"], indices, name)
            logps = self._logps(prompts, name, indices=indices, distributed=False)
            return self._columns(logps, _totals(logps)).to_pydict()

        return dataset.map(add_scores, with_indices=True, batched=True, batch_size=256)

    def _token_ids(self, dataset: Dataset, name: str) -> list[np.ndarray]:
        if len(dataset) == 0:
            raise ValueError(f"The {name} dataset has no rows: there is nothing to score.")
        prompts = dataset.select_columns(["prompt"]).with_format(None)
        token_ids = []
        for start in range(0, len(prompts), 1000):
            batch = prompts[start : start + 1000]["prompt"]
            token_ids += self._checked(batch, range(start, start + len(batch)), name)
        return token_ids

    def _checked(self, prompts: list, rows: Sequence[int], name: str) -> list[np.ndarray]:
        """Token ids of some rows' prompts, or an error that names the row."""
        for row, prompt in zip(rows, prompts, strict=True):
            _check_prompt(prompt, type(prompts[0]), f"Row {row} of the {name} dataset")
        token_ids = [np.array(ids, dtype=np.int32) for ids in self.tokenize(prompts)]
        for row, ids in zip(rows, token_ids, strict=True):
            where = f"Row {row} of the {name} dataset"
            if len(ids) < 2:
                raise ValueError(
                    f"{where}: its prompt is {len(ids)} token long, and the first token is never scored. "
                    "Drop the row, or give it a longer prompt."
                )
            if self.max_length is not None and len(ids) > self.max_length:
                raise ValueError(
                    f"{where}: its prompt is {len(ids)} tokens long, and the model has {self.max_length} positions. "
                    "Filter out over-long prompts before scoring."
                )
            if self.identity.start is not None and self.identity.span.n_scored(len(ids)) < 1:
                raise ValueError(
                    f"{where}: its prompt is {len(ids)} tokens long, and nothing is left of it after dropping the "
                    f"template found in the training set ({self.identity.start} tokens before the query, "
                    f"{self.identity.end} after). Give it the template of the training set, or use "
                    "`query_scope='prompt'`."
                )
        return token_ids

    def _fit_span(self, prompts: list[np.ndarray], name: str):
        span = QuerySpan()
        if self.identity.scope == "query":
            span = common_span(prompts)
            if span is None:
                span = QuerySpan()
                logger.warning(
                    f"All {len(prompts)} prompts of the {name} dataset are the same: there is no template to tell "
                    "from the query, so the whole prompt is scored, as with `query_scope='prompt'`."
                )
        self.identity = replace(self.identity, start=span.start, end=span.end)

    def _fit_weight(self, totals: torch.Tensor):
        identity = self.identity
        if identity.mean_nll is None:
            identity = replace(identity, mean_nll=-totals.mean().item())
        if identity.weight_mean is None:
            weight = query_weight(totals, identity.mean_nll, identity.weight_min, identity.weight_max)
            identity = replace(identity, weight_mean=weight.mean().item())
        self.identity = identity

    def _columns(self, logps: list[np.ndarray], totals: torch.Tensor) -> pa.Table:
        identity = self.identity
        weight = query_weight(totals, identity.mean_nll, identity.weight_min, identity.weight_max)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in logps])]).astype(np.int32)
        return pa.table(
            {
                "ref_query_logps": pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(logps))),
                "ref_query_logp": pa.array(totals.float().numpy()),
                "query_weight": pa.array((weight / identity.weight_mean).float().numpy()),
                "ref_query_id": pa.array([str(identity)] * len(logps)),
            }
        )

    def _logps(
        self, prompts: list[np.ndarray], name: str, indices: Sequence[int] | None = None, distributed: bool = True
    ) -> list[np.ndarray]:
        """Log-probs of every row's scored tokens: equal prompts are scored once, known ones not at all."""
        keys = [xxhash.xxh3_128_digest(ids.tobytes()) for ids in prompts]
        by_key = dict(zip(reversed(keys), reversed(range(len(prompts))), strict=True))  # the first row of each prompt
        state = PartialState()
        rank, world = (state.process_index, state.num_processes) if distributed else (0, 1)
        workers = 1 if self.main_process_only else world
        cache = ScoreCache(self.cache_dir / self.identity.scores_key())
        known = self._load(cache, rank, world)
        missing = sorted((key for key in by_key if key not in known), key=lambda key: -len(prompts[by_key[key]]))
        if missing:
            batches = self._batches([(key, by_key[key], len(prompts[by_key[key]])) for key in missing], workers)
            fresh = {}
            if rank < workers:
                with self.reference() as score, self._progress(batches, name, rank) as progress:
                    # Every process makes as many forwards as the others: a sharded model needs them all in each
                    for turn in range(0, len(batches), workers):
                        keys_, rows, _ = zip(*batches[min(turn + rank, len(batches) - 1)], strict=True)
                        scored = score([prompts[row] for row in rows], self.identity.span)
                        _check_finite(scored, rows if indices is None else [indices[row] for row in rows], name)
                        fresh |= dict(zip(keys_, scored, strict=True))
                        if turn + rank < len(batches):
                            cache.add(dict(zip(keys_, scored, strict=True)))
                        progress.update(sum(n for batch in batches[turn : turn + workers] for *_, n in batch))
            for part in gather_object([fresh]) if world > 1 else [fresh]:
                known |= part
            if rank == 0 and distributed:
                cache.compact()
        return [known[key] for key in keys]

    def _load(self, cache: ScoreCache, rank: int, world: int) -> dict[bytes, np.ndarray]:
        """The cached scores; every process works with what the first one finds, so that they agree on the rest."""
        if self._known[0] != self.identity.scores_key():
            found = [cache.load() if rank == 0 else None]
            self._known = self.identity.scores_key(), (broadcast_object_list(found) if world > 1 else found)[0]
        return self._known[1]

    def _batches(self, prompts: list[tuple[bytes, int, int]], workers: int) -> list[list[tuple[bytes, int, int]]]:
        """
        (key, row, tokens) of each prompt in batches, longest first, so that padding is little and memory peaks at the
        start; some work for every process.
        """
        budget = min(self.batch_tokens, -(-sum(length for *_, length in prompts) // workers))
        batches, start = [], 0
        while start < len(prompts):
            n_rows = max(1, budget // prompts[start][2])
            batches.append(prompts[start : start + n_rows])
            start += n_rows
        return batches

    def _progress(self, batches: list, name: str, rank: int) -> tqdm:
        return tqdm(
            total=sum(length for batch in batches for *_, length in batch),
            desc=f"Scoring {name} prompts",
            unit="tok",
            unit_scale=True,
            disable=rank != 0 or bool(os.environ.get("TQDM_DISABLE")),
        )


def _totals(logps: list[np.ndarray]) -> torch.Tensor:
    return torch.tensor([row.sum(dtype=np.float64) for row in logps], dtype=torch.float64)


def _check_columns(columns: list[str], name: str):
    if "prompt" not in columns:
        raise ValueError(
            f"The {name} dataset has no `prompt` column, only {', '.join(map(repr, columns))}. Rename one with "
            "`dataset.rename_column(..., 'prompt')`."
        )
    for column in ("image", "images"):
        if column in columns:
            raise ValueError(
                f"The {name} dataset has a column {column!r}: the likelihood of a prompt with images is not defined "
                "here. Remove the column, or train with `query_kl_coef=0, use_query_weight=False`."
            )


def _check_prompt(prompt, kind: type, where: str):
    if prompt is None or not isinstance(prompt, (str, list)):
        raise ValueError(f"{where}: `prompt` must be a string or a list of messages, got {prompt!r}.")
    if not isinstance(prompt, kind):
        raise ValueError(f"{where}: `prompt` is a {type(prompt).__name__}, and a {kind.__name__} in the rows before.")
    contents = [prompt] if isinstance(prompt, str) else [message.get("content") for message in prompt]
    if not any(contents):
        raise ValueError(f"{where}: `prompt` is empty.")
    for content in contents:
        if isinstance(content, list) and any(part.get("type") != "text" for part in content):
            raise ValueError(
                f"{where}: `prompt` has content that is not text ({[part.get('type') for part in content]}): the "
                "likelihood of a prompt with images is not defined here."
            )


def _check_finite(scored: list[np.ndarray], rows: Sequence[int], name: str):
    for row, logps in zip(rows, scored, strict=True):
        if not np.isfinite(logps).all():
            raise ValueError(
                f"Row {row} of the {name} dataset: log-prob {logps[~np.isfinite(logps)][0]} at scored token "
                f"{int(np.flatnonzero(~np.isfinite(logps))[0])} of {len(logps)}. The reference is broken or overflows "
                "in its dtype: try `dtype='bfloat16'` or `'float32'`."
            )


# Entries of a model's config that no log-prob depends on
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype", "use_cache")


def weights_hash(model: nn.Module) -> str:
    """
    A hash of a module's config, parameters and buffers: over all processes' shards where it is sharded, else those of
    the main process (under FSDP, the others may have loaded none).
    """
    sharded = any(hasattr(p, "ds_tensor") or hasattr(p, "to_local") for p in model.parameters())
    own = _own_weights_hash(model) if sharded or PartialState().is_main_process else None
    shards = [shard for shard in gather_object([own]) if shard]
    return (shards[0] if len(shards) == 1 else _digest("".join(shards).encode()))[:16]


def _own_weights_hash(model: nn.Module) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_THE_MODEL}
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3 keeps this process's part there
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def files_hash(folder: Path) -> str:
    """A hash of a checkpoint folder's weights and config."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.glob("*")):
        if path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "adapter_config.json"):
            digest.update(path.name.encode())
            with open(path, "rb") as file:
                while chunk := file.read(1 << 24):
                    digest.update(chunk)
    return digest.hexdigest()[:16]


def tokenizer_hash(
    processing_class,
    chat_template: str | None = None,
    chat_template_kwargs: dict | None = None,
    tools: Sequence[Callable] | None = None,
) -> str:
    """A hash of all that turns a prompt into token ids: tokenizer, chat template, its kwargs, and tools."""
    from transformers.utils import get_json_schema

    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = json.loads(backend.to_str()) if backend is not None else sorted(tokenizer.get_vocab().items())
    if isinstance(content, dict):  # state of the last call, not of the tokenizer
        content = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    parts = {
        "class": type(tokenizer).__name__ if backend is None else None,
        "content": content,
        "special": {key: str(value) for key, value in tokenizer.special_tokens_map.items() if key != "pad_token"},
        "template": chat_template or processing_class.chat_template,
        "kwargs": chat_template_kwargs or {},
        "tools": [tool if isinstance(tool, dict) else get_json_schema(tool) for tool in tools or []],
    }
    return _digest(json.dumps(parts, sort_keys=True, default=str).encode())[:16]


def forward_dtype(model: nn.Module) -> str:
    """The dtype in which the model computes here and now: autocast's, or its own."""
    device_type = next(model.parameters()).device.type
    if torch.is_autocast_enabled(device_type):
        return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")
    return str(model.dtype).removeprefix("torch.")


def model_positions(config) -> int | None:
    """How many positions the model has, if it says so."""
    n_positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    return n_positions if isinstance(n_positions, int) and n_positions > 0 else None


class Reference:
    """The reference of [`score_queries`]: a module as it is, or a checkpoint that is loaded when it is needed."""

    def __init__(
        self,
        model: str | nn.Module,
        temperature: float,
        dtype=None,
        init_kwargs: dict | None = None,
        vllm_kwargs: dict | None = None,
    ):
        from transformers import AutoConfig

        self.temperature = temperature
        self.vllm_kwargs = vllm_kwargs
        if vllm_kwargs is not None and isinstance(model, nn.Module):
            raise ValueError("`backend='vllm'` loads the model itself: pass its folder or Hub id, not a module.")
        dtype = str(dtype).removeprefix("torch.") if dtype is not None else None
        if dtype is not None and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"`dtype` must be a torch dtype or the name of one, such as 'bfloat16', got {dtype!r}.")
        if isinstance(model, nn.Module):
            self.model, self.config = model, model.config
            self.name, self.dtype = weights_hash(model), forward_dtype(model)
            if dtype not in (None, self.dtype):
                raise ValueError(
                    f"`dtype={dtype!r}` is for a model given by name, and this module computes in {self.dtype}: "
                    f"convert it first, `model.to(torch.{dtype})`."
                )
            return
        self.model, self.path = None, model
        self.init_kwargs = dict(init_kwargs or {})
        self.config = AutoConfig.from_pretrained(
            model, **{k: v for k, v in self.init_kwargs.items() if k in ("revision", "trust_remote_code", "cache_dir")}
        )
        self.name = files_hash(Path(model)) if os.path.isdir(model) else f"{model}@{self._commit()}"
        told_elsewhere = ("revision", "trust_remote_code", "device_map", "cache_dir")
        loading = {k: v for k, v in self.init_kwargs.items() if k not in told_elsewhere}
        if loading:  # a quantization, other rotary frequencies, ...
            self.name += "+" + _digest(json.dumps(loading, sort_keys=True, default=str).encode())[:16]
        self.dtype = dtype or str(self.config.dtype or torch.float32).removeprefix("torch.")

    def _commit(self) -> str:
        """The commit of the Hub model, from where its config was just put in the Hub cache."""
        config = try_to_load_from_cache(
            self.path, "config.json", self.init_kwargs.get("cache_dir"), self.init_kwargs.get("revision")
        )
        return Path(config).parent.name

    @contextmanager
    def __call__(self):
        from transformers import AutoModelForCausalLM

        if self.vllm_kwargs is not None:
            engine = {"revision": self.init_kwargs.get("revision"), **(self.vllm_kwargs.get("engine_kwargs") or {})}
            vllm = vllm_reference(
                self.path, self.dtype, self.temperature, **self.vllm_kwargs | {"engine_kwargs": engine}
            )
            with preserved_random_states(), vllm as score:
                yield score
            return
        with preserved_random_states():
            if self.model is None:
                self.init_kwargs.setdefault("device_map", {"": PartialState().device})
                self.model = AutoModelForCausalLM.from_pretrained(
                    self.path, dtype=getattr(torch, self.dtype), **self.init_kwargs
                )
            with evaluation_mode(self.model), fused_lm_head(self.model, self.temperature):
                yield partial(score_token_ids, self.model, self.model.device)


def score_queries(
    dataset: Dataset | DatasetDict | IterableDataset | IterableDatasetDict,
    model: str | nn.Module,
    tokenizer=None,
    *,
    temperature: float = 1.0,
    query_scope: str = "query",
    weight_min: float = 0.5,
    weight_max: float = 2.0,
    normalize_weight: bool = False,
    span: tuple[int, int] | None = None,
    mean_nll: float | None = None,
    chat_template_kwargs: dict | None = None,
    tools: Sequence[Callable] | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    model_init_kwargs: dict | None = None,
    batch_tokens: int = 4096,
    cache_dir: str | Path | None = None,
    backend: str = "transformers",
    vllm_kwargs: dict | None = None,
):
    """
    Score the prompts of a dataset under the frozen reference: the preprocessing step of ERPO (arXiv 2608.23311, §4).

    Adds four columns: `ref_query_logps` (list of float32, nats: log P_θ0(x_t | x_<t) of each scored token),
    `ref_query_logp` (their sum ℓ_θ0), `query_weight` (clip(s̄ / s_i), Appendix I), and `ref_query_id` (how the row was
    scored, JSON: reference weights, tokenizer with chat template, dtype, temperature, scope and span, s̄, clip range).
    Rows and their order are kept; equal prompts are scored once. Scores are cached by all of the above and by prompt:
    a second call makes no forward, an interrupted one goes on from its last batch. Under `accelerate launch` each
    process scores its share, so all of them must make the call. The global random states are left as they were.

    Args:
        dataset (`Dataset`, `DatasetDict`, `IterableDataset` or `IterableDatasetDict`):
            With a `prompt` column, strings or conversations, as for `GRPOTrainer`. Of a dict, `train` sets the span
            and the mean for all splits. An iterable one needs `mean_nll` and, with `query_scope="query"`, `span`.
        model (`str` or `torch.nn.Module`):
            The reference: a Hub id, a folder, or a causal LM. In RL, the policy before the first update.
        tokenizer (`str` or tokenizer or processor, *optional*):
            The one that the trainer will use. Defaults to the model's.
        temperature (`float`):
            The trainer's sampling temperature; logits are divided by it.
        query_scope (`str`):
            `"query"`: the tokens left when the longest token prefix and suffix common to all prompts are dropped (the
            template); the sum is conditional on the prefix. `"prompt"`: all but the first token, which has no
            conditional.
        weight_min (`float`), weight_max (`float`), normalize_weight (`bool`):
            See [`query_weight`].
        span (`tuple[int, int]`, *optional*):
            Tokens to drop at the start (at least 1) and at the end, instead of finding them.
        mean_nll (`float`, *optional*):
            s̄ in nats, instead of the dataset's mean.
        chat_template_kwargs (`dict`, *optional*), tools (list of `Callable`, *optional*):
            The trainer's.
        dtype (`str` or `torch.dtype`, *optional*):
            To load a named model in; defaults to the checkpoint's. Log-softmax is in float32 in any case.
        revision (`str`, *optional*), model_init_kwargs (`dict`, *optional*):
            For `from_pretrained` of a named model.
        batch_tokens (`int`):
            Padded tokens per forward.
        cache_dir (`str` or `Path`, *optional*):
            Defaults to `$ERPO_TRL_CACHE`, or a folder in the `datasets` cache.
        backend (`str`):
            `"transformers"`, or `"vllm"` for a named model at temperature 1.0; in float32 they agree to 1e-3 a token.
        vllm_kwargs (`dict`, *optional*):
            With `backend="vllm"`: `tensor_parallel_size`, `max_model_len`, `engine_kwargs`; see [`vllm_reference`].

    Returns:
        The same kind of dataset, with the columns.

    Raises:
        `ValueError`: no `prompt` column; a prompt that is empty, one token long, longer than the model's positions, or
        has images; a non-finite log-prob; a dict without `train`; an iterable one without mean or span.
    """
    from transformers import AutoTokenizer

    if query_scope not in ("query", "prompt"):
        raise ValueError(f"`query_scope` must be 'query' or 'prompt', got {query_scope!r}.")
    if span is not None and (query_scope == "prompt" or span[0] < 1 or span[1] < 0):
        raise ValueError(
            f"`span` is for `query_scope='query'`: at least 1 token dropped at the start and 0 at the end, got {span} "
            f"with `query_scope={query_scope!r}`."
        )
    if backend not in ("transformers", "vllm"):
        raise ValueError(f"`backend` must be 'transformers' or 'vllm', got {backend!r}.")
    if backend == "vllm" and PartialState().num_processes > 1:
        raise ValueError(
            "`backend='vllm'` spreads the model over GPUs itself: start one process (`python ...` in the place of "
            "`accelerate launch ...`) and set `tensor_parallel_size`."
        )
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0, got {temperature}.")
    query_weight(torch.tensor([-1.0]), None, weight_min, weight_max)  # the clip range is checked before any work
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if tokenizer is None:
        tokenizer = model if isinstance(model, str) else model.config._name_or_path
        if not tokenizer:
            raise ValueError("The model does not say where its tokenizer is: pass the trainer's as `tokenizer`.")
    if isinstance(model, nn.Module) and isinstance(dataset, (IterableDataset, IterableDatasetDict)):
        model = copy.deepcopy(model)  # a stream is read, and scored, while training changes the original
    if isinstance(tokenizer, str):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer, revision=revision)
    tokenizing = {
        "chat_template": trainer_chat_template(tokenizer, tools),
        "chat_template_kwargs": chat_template_kwargs,
        "tools": tools,
    }
    reference = Reference(
        model,
        temperature,
        dtype,
        {"revision": revision or "main", **(model_init_kwargs or {})},
        (vllm_kwargs or {}) if backend == "vllm" else None,
    )
    identity = ScoreIdentity(
        model=reference.name,
        tokenizer=tokenizer_hash(tokenizer, **tokenizing),
        dtype=reference.dtype,
        temperature=float(temperature),
        scope=query_scope,
        weight_min=float(weight_min),
        weight_max=float(weight_max),
        mean_nll=mean_nll,
        weight_normalized=normalize_weight,
        weight_mean=None if normalize_weight else 1.0,
    )
    if span is None and query_scope == "prompt":
        span = (1, 0)
    if span is not None:
        identity = replace(identity, start=span[0], end=span[1])
    scorer = QueryScorer(
        reference,
        prompt_tokenizer(tokenizer, **tokenizing),
        identity,
        max_length=model_positions(reference.config),
        batch_tokens=batch_tokens,
        cache_dir=cache_dir,
    )
    return score_splits(scorer, dataset)


def score_splits(scorer: QueryScorer, dataset, name: str = "train"):
    """Score a dataset of any kind, `train` first."""
    if isinstance(dataset, IterableDataset):
        return scorer.score_stream(dataset, name)
    if isinstance(dataset, Dataset):
        return scorer.score(dataset, name)
    identity = scorer.identity
    if None in (identity.start, identity.mean_nll, identity.weight_mean) and "train" not in dataset:
        raise ValueError(
            f"The dataset has the splits {', '.join(map(repr, dataset))} and no 'train': the span and the mean come "
            "from the training set. Name one of them 'train', or score one split at a time."
        )
    scored = {
        split: score_splits(scorer, dataset[split], split) for split in sorted(dataset, key=lambda s: s != "train")
    }
    return type(dataset)({split: scored[split] for split in dataset})
