"""The same numbers on every back-end: two real processes over gloo against one process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers import make_model


pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KEYS = [
    "loss",
    "grad_norm",
    "query_kl",
    "query_kl_loss",
    "query_nll",
    *(f"query_weight/{s}" for s in ("mean", "min", "max")),
]
needs_deepspeed = pytest.mark.skipif(not importlib.util.find_spec("deepspeed"), reason="deepspeed is not installed")
BACKENDS = ["multi_gpu", "fsdp2", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]


def cpu_config(name: str, tmp_path: Path, **changes) -> Path:
    """The accelerate configuration of that name, for two processes on CPU cores."""
    config = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    config |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": name in ("multi_gpu", "fsdp2")}
    if name == "fsdp2":
        config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "Qwen2DecoderLayer"
        config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False
    config.get("deepspeed_config", {}).update(changes)
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def launch(tmp_path: Path, backend: str | None, changes: dict | None = None, **options) -> dict:
    """Run the worker on a back-end (`None`: one process) and return its report."""
    output = tmp_path / f"{backend}.json"
    worker = [str(HERE / "train_worker.py"), str(output), str(backend), str(tmp_path / "model"), json.dumps(options)]
    make_model("qwen2").save_pretrained(tmp_path / "model")
    command = [sys.executable, *worker]
    if backend:
        config = cpu_config(backend, tmp_path, **(changes or {}))
        accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
        command = [*accelerate, "--config_file", str(config), "--main_process_port", "0", *worker]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "ERPO_TRL_CACHE": str(tmp_path / f"scores-{backend}"),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert output.exists(), done.stderr[-5000:]
    return json.loads(output.read_text())


def check(report: dict, backend: str):
    assert report["world"] == 2
    assert report["fsdp"] == report["dtensors"] == (backend == "fsdp2")
    assert report["zero_stage"] == {"zero2": 2, "zero3": 3}.get(backend)
    assert report["partitioned"] == (backend == "zero3")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict:
    return launch(tmp_path_factory.mktemp("one"), None, per_device_train_batch_size=12)


@needs_deepspeed
@pytest.mark.parametrize("flag", [True, False])
def test_zero3_with_and_without_partitioned_loading(tmp_path, flag):
    """The scoring at construction leaves nothing behind that breaks real generation."""
    report = launch(tmp_path, "zero3", {"zero3_init_flag": flag}, per_device_train_batch_size=4, generate=True)
    check(report, "zero3")
    assert report["log"][0]["query_kl"] < 1e-6 < report["log"][-1]["query_kl"]


@needs_deepspeed
def test_lora_under_zero3_with_checkpointing(tmp_path):
    """The reference is the model as it is when training starts: Query-KL is 0 there, and moves after."""
    report = launch(tmp_path, "zero3", per_device_train_batch_size=4, gradient_checkpointing=True, lora=True)
    check(report, "zero3")
    assert report["log"][0]["query_kl"] < 1e-9 < 1e-7 < report["log"][-1]["query_kl"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_two_processes_give_the_numbers_of_one(tmp_path, one, backend, gradient_checkpointing):
    """6 rows a process and twice 2 of them accumulated: a group of 8 lies on both."""
    two = launch(tmp_path, backend, per_device_train_batch_size=6, gradient_checkpointing=gradient_checkpointing)
    check(two, backend)
    assert two["scores"] == pytest.approx(one["scores"], abs=1e-4)
    assert len(one["log"]) == len(two["log"]) == 4 and one["log"][-1]["query_kl"] > 1e-3
    for step, (expected, found) in enumerate(zip(one["log"], two["log"], strict=True)):
        for key in KEYS:
            assert found[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-4), (step, key)
