"""Finished (benchmark, temperature) cells on disk: one parquet each, whole or not there."""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


SCHEMA = pa.schema(
    {
        "benchmark": pa.string(),
        "temperature": pa.float64(),
        "question": pa.int64(),
        "sample": pa.int64(),
        "question_text": pa.string(),
        "gold": pa.string(),
        "completion": pa.string(),
        "answer": pa.string(),
        "correct": pa.float64(),
        "format": pa.float64(),
        "tokens": pa.int64(),
        "truncated": pa.bool_(),
    }
)
SETTINGS = b"erpo_trl.evaluation"


def cell_path(folder: str | Path, benchmark: str, temperature: float) -> Path:
    """`<folder>/samples/<benchmark>_T<temperature>.parquet`"""
    return Path(folder) / "samples" / f"{benchmark}_T{temperature:g}.parquet"


def write_cell(path: Path, samples: Sequence[Mapping], settings: Mapping) -> None:
    """Samples of one cell with the settings that made them; under a temporary name first, so never half-written."""
    rows = [{"benchmark": settings["benchmark"], "temperature": settings["temperature"], **s} for s in samples]
    table = pa.Table.from_pylist(rows, SCHEMA.with_metadata({SETTINGS: json.dumps(settings)}))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    pq.write_table(table, temporary)
    os.replace(temporary, path)


def read_settings(path: Path) -> dict | None:
    """Settings of a cell on disk; `None` if it isn't a whole file of ours."""
    try:
        return json.loads(pq.read_schema(path).metadata[SETTINGS])
    except (pa.ArrowInvalid, KeyError, TypeError):
        return None


def read_cell(path: Path) -> list[dict]:
    """Samples of a cell, without the long texts."""
    columns = ["question", "sample", "answer", "correct", "format", "tokens", "truncated"]
    return pq.read_table(path, columns=columns).to_pylist()


def is_finished(path: Path, settings: Mapping) -> bool:
    """
    Whether a cell is on disk, made with these settings. One that can't be read counts as not there.

    Raises:
        ValueError: if it was made with others.
    """
    if not path.exists():
        return False
    found = read_settings(path)
    if found is None:
        print(f"{path} is not a whole result file; it is made again.")
        return False
    differing = [key for key in settings if settings[key] != found.get(key)]
    if differing:
        changes = "; ".join(f"{key}: {found.get(key)!r} there, {settings[key]!r} now" for key in differing)
        raise ValueError(
            f"{path} was made with other settings ({changes}). Use --overwrite to replace it, or another --output_dir."
        )
    return True


def write_text(path: Path, text: str) -> None:
    """A small file, whole or not there."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_json(path: Path, value) -> None:
    """JSON, whole or not there; NaN, which JSON does not have, becomes null."""
    write_text(path, json.dumps(_without_nan(value), indent=1, ensure_ascii=False))


def _without_nan(value):
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def digest(value) -> str:
    """Short identity of anything JSON can hold."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def model_identity(model: str) -> str | None:
    """What changes when a local model folder is written again: its files' names, sizes, times. `None` for a Hub id."""
    if not Path(model).is_dir():
        return None
    files = sorted(path for path in Path(model).iterdir() if path.suffix in {".safetensors", ".bin", ".json"})
    return digest([[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files])
