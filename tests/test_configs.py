"""What the YAML files of the paper's runs do, computed, against the set-up the paper states."""

import re
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments
from trl import ModelConfig, TrlParser

from erpo_trl.config import ERPOConfig, ERPORLOOConfig
from erpo_trl.methods import METHODS, get_method


CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
FAMILIES = {"grpo": ERPOConfig, "rloo": ERPORLOOConfig}
PAPER_RUNS = ["qwen2.5-math-7b", "qwen2.5-32b"]
FILES = [*PAPER_RUNS, "qwen2.5-math-1.5b"]


@dataclass
class ScriptArguments:
    """The arguments of the recipe itself that these files use."""

    dataset_name: str | None = None
    min_level: int = 0
    max_prompt_length: int | None = None


def header(name):
    return "".join(
        line for line in (CONFIGS / f"{name}.yaml").read_text().splitlines(keepends=True) if line.startswith("#")
    )


def world_size(name):
    return int(re.search(r"^# World size: (\d+)", header(name), re.MULTILINE)[1])


def override(name, title):
    """The command-line arguments that the file's header gives under a title."""
    return re.search(rf"^#   {re.escape(title)} +(--.+)$", header(name), re.MULTILINE)[1].split()


@pytest.fixture
def load(monkeypatch, tmp_path):
    def load(name, *arguments, method="erpo"):
        """The parsed arguments of a launch of this file on the world size it assumes."""
        monkeypatch.setattr(TrainingArguments, "world_size", property(lambda args: world_size(name)))
        parser = TrlParser((ScriptArguments, FAMILIES[get_method(method).trainer], ModelConfig))
        parser.set_defaults_with_config(**get_method(method).options)
        cpu = ["--use_cpu", "true", "--output_dir", str(tmp_path)]
        return parser.parse_args_and_config(["--config", str(CONFIGS / f"{name}.yaml"), *cpu, *arguments])

    return load


def completions_per_update(name, args):
    return world_size(name) * args.per_device_train_batch_size * args.gradient_accumulation_steps


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_paper_s_batches(load, name):
    _, args, _ = load(name)
    assert args.num_generations == 8
    assert args.generation_batch_size == 512 * 8
    assert completions_per_update(name, args) == 128 * 8 == 1024
    assert args.generation_batch_size // completions_per_update(name, args) == 4
    updates_per_rollout = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    assert updates_per_rollout == 4
    assert args.max_steps == 960
    assert args.max_steps / updates_per_rollout == 240
    assert round(240 * 512 / 8500) in (14, 15)  # epochs


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_paper_s_optimizer_and_estimator(load, name):
    script_args, args, model_args = load(name)
    assert args.learning_rate == 1e-6
    assert args.lr_scheduler_type == "constant"
    assert args.warmup_steps == 0
    assert args.weight_decay == 0.01
    assert args.max_grad_norm == 1.0
    assert args.optim.startswith("adamw")
    assert (args.epsilon, args.epsilon_high) == (0.2, 0.3)
    assert args.loss_type == "dapo"  # token-level
    assert args.temperature == 1.0
    assert (args.top_p, args.top_k, args.min_p, args.repetition_penalty) == (1.0, 0, None, 1.0)
    assert script_args.max_prompt_length + args.max_completion_length == 3 * 1024 == args.vllm_max_model_length
    assert (args.beta, args.query_kl_coef, args.use_query_weight) == (0.0, 0.01, True)
    assert (script_args.min_level, script_args.dataset_name) == (3, "nlile/hendrycks-MATH-benchmark")
    assert model_args.model_name_or_path == {PAPER_RUNS[0]: "Qwen/Qwen2.5-Math-7B"}.get(name, "Qwen/Qwen2.5-32B")
    assert model_args.dtype == "float32" and args.bf16


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_sixteen_completions_and_the_long_run_by_override(load, name):
    _, args, _ = load(name, *override(name, "n = 16"))
    assert args.num_generations == 16
    assert args.generation_batch_size == 512 * 16
    assert completions_per_update(name, args) == 128 * 16
    assert args.steps_per_generation == 4 * args.gradient_accumulation_steps
    _, args, _ = load(name, *override(name, "1K steps"))
    assert args.max_steps * args.gradient_accumulation_steps / args.steps_per_generation == 1000


def test_the_alpha_override_wins_over_the_method(load):
    name = "qwen2.5-math-7b"
    assert load(name, *override(name, "alpha"))[1].query_kl_coef == 0.05


def test_the_small_run_and_its_lora_variant(load):
    name = "qwen2.5-math-1.5b"
    _, args, model_args = load(name)
    assert (args.generation_batch_size, completions_per_update(name, args)) == (512, 128)
    assert not model_args.use_peft
    _, lora, model_args = load(name, *override(name, "LoRA on 24 GB"))
    assert (lora.generation_batch_size, completions_per_update(name, lora)) == (512, 128)
    assert model_args.use_peft and model_args.lora_dropout == 0 and model_args.lora_target_modules == "all-linear"
    assert (lora.learning_rate, args.learning_rate) == (1e-5, 1e-6)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_from_every_file(load, name, method):
    # TrlParser raises on a key that a family's config does not have.
    _, args, _ = load(name, method=method)
    assert {key: getattr(args, key) for key in METHODS[method].options} == METHODS[method].options


@pytest.mark.parametrize("name", FILES)
def test_a_file_sets_nothing_of_a_method(name):
    given = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert not given.keys() & {key for method in METHODS.values() for key in method.options}
    known = {field.name for cls in (ScriptArguments, ERPOConfig, ModelConfig) for field in fields(cls)}
    assert given.keys() <= known
