"""The documents name code and options that exist, and the API reference renders without a warning."""

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer


ROOT = Path(__file__).parent.parent
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("erpo_trl", "erpo_trl/evaluation")
    for path in (ROOT / folder).glob("[!_]*.py")
)


def resolve(name: str):
    """The object of a dotted name: the longest prefix that is a module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


@pytest.mark.parametrize("page", ["differences.md", "migration.md"])
def test_code_that_the_pages_name_exists(page):
    text = (ROOT / "docs" / page).read_text("utf-8")
    names = set(re.findall(r"`(erpo_trl(?:\.\w+)+)`", text))
    assert len(names) >= (20 if page == "differences.md" else 1)
    for name in names:
        resolve(name)
    for path in re.findall(r"recipes/\w+\.py", text):
        assert (ROOT / path).is_file()


def test_migration_page_has_every_option():
    text = (ROOT / "docs" / "migration.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+)`", text))
    own = {f.name for f in dataclasses.fields(GRPOConfig)} - {f.name for f in dataclasses.fields(TrainingArguments)}
    assert {name for name in own if not name.startswith("vllm_")} <= named
    every = {f.name for f in dataclasses.fields(GRPOConfig)}
    options = text.split("## What each option")[1].split("### Arguments of the trainer")[0]
    for row in re.findall(r"^\| (`.*?) \|", options, flags=re.MULTILINE):
        assert set(re.findall(r"`(\w+)`", row)) <= every  # none that TRL has dropped
    unchanged = options.split("### Unchanged")[1]
    assert set(re.findall(r"`(\w+)`", unchanged)) - {"TrainingArguments"} <= every
    arguments = text.split("### Arguments of the trainer")[1].split("## Publishing")[0]
    rows = re.findall(r"^\| (`.*?) \|", arguments, flags=re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", " ".join(rows))) <= set(inspect.signature(GRPOTrainer).parameters)


@pytest.mark.slow
def test_api_reference_renders_without_warnings(tmp_path):
    command = [sys.executable, "-W", "error::UserWarning", "-m", "pdoc", "-d", "google", "-o", str(tmp_path)]
    modules = ["erpo_trl", "erpo_trl.evaluation", "erpo_trl.tiny", "!erpo_trl.tiny.build", *MODULES]
    done = subprocess.run([*command, *modules], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower()
    page = (tmp_path / "erpo_trl" / "scoring.html").read_text("utf-8")
    assert "clip(s̄ / s_i)" in page and "ref_query_logps" in page
    for module in MODULES:
        assert (tmp_path / f"{module.replace('.', '/')}.html").is_file()
