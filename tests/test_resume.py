"""A killed run goes on with the reference scores of its start, as near to the uninterrupted run as TRL's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import make_model


pytestmark = pytest.mark.slow

WORKER = Path(__file__).parent / "resume_worker.py"


def run(folder: Path, method: str, name: str, kill_at: int = 0, resume: bool = False, **options) -> dict | None:
    command = [method, folder, name, kill_at, "resume" if resume else "start", json.dumps(options)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ERPO_TRL_CACHE": str(folder / "scores")}
    environment["PYTHONPATH"] = str(WORKER.parent.parent)
    done = subprocess.run(
        [sys.executable, str(WORKER), *map(str, command)], capture_output=True, text=True, env=environment, timeout=300
    )
    if kill_at:
        assert done.returncode == -9, done.stderr[-3000:]
        return None
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / f"{name}.json").read_text())


def distance(folder: Path, a: str, b: str) -> float:
    a, b = (torch.load(folder / f"{name}.pt") for name in (a, b))
    return max((a[key] - b[key]).abs().max().item() for key in a)


# A step has two micro-batches, and the eighth is cut off: in the middle of step 4. A rollout serves one step or two:
# then the last checkpoint, of step 3, is from the middle of a rollout, whose second half TRL does not keep.
@pytest.mark.parametrize("options", [{}, {"steps_per_generation": 4}], ids=["accumulation", "rollout"])
def test_killed_and_resumed(tmp_path, options):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    distances = {}
    for method in ("grpo", "erpo"):
        whole = run(tmp_path, method, f"{method}-whole", **options)
        run(tmp_path, method, f"{method}-killed", kill_at=8, **options)
        resumed = run(tmp_path, method, f"{method}-killed", resume=True, **options)
        assert whole["micro_steps"] == 12 and resumed["micro_steps"] == 6
        distances[method] = distance(tmp_path, f"{method}-whole", f"{method}-killed")
        if method == "erpo":
            assert resumed["scores"] == whole["scores"]
            kl = [entry["query_kl"] for entry in resumed["log"] if "query_kl" in entry]
            assert len(kl) == 6 and kl[0] < 1e-9 and min(kl[2:]) > 1e-6  # against the start, not the checkpoint
    print(distances)
    if distances["grpo"] == 0:
        assert distances["erpo"] == 0
    else:  # TRL does not keep a rollout across a kill: both go on from other samples
        assert distances["erpo"] < 3 * distances["grpo"]
