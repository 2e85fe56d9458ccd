"""No network, no noise; a score cache and a Hub cache of the test's own."""

import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import pytest  # noqa: E402
from helpers import COMMIT, make_tokenizer  # noqa: E402


@pytest.fixture
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A score cache of the test's own."""
    monkeypatch.setenv("ERPO_TRL_CACHE", str(tmp_path / "scores"))
    return tmp_path / "scores"


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A Hub cache in which the embedded model is `org/base`."""
    import shutil

    from erpo_trl.tiny import MODEL_PATH

    repo = tmp_path / "hub" / "models--org--base"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    shutil.copytree(MODEL_PATH, repo / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"
