"""bfloat16, by autocast and in the weights: step 0, gradients, and the tolerance of the first-step guard."""

import copy
import json
import math

import pytest
import torch
from helpers import make_model, make_tokenizer
from test_trainer import Recorder, make_dataset, reward
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from erpo_trl import ERPOConfig, ERPOTrainer, score_queries
from erpo_trl.query_likelihood import agreement_tolerance, fused_lm_head


MODES = ["autocast", "weights"]
TOLERANCE = agreement_tolerance(["bfloat16"], 2)  # the models of helpers.py have two layers


def make_trainer(tmp_path, mode, kind="qwen2", dataset=None, recorder=None, **options):
    model = make_model(kind)
    defaults = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 3,
        "gradient_checkpointing": False,
    }
    args = ERPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=mode == "autocast",
        num_generations=2,
        max_completion_length=6,
        logging_steps=1,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        **defaults | options,
    )
    return ERPOTrainer(
        model.to(torch.bfloat16) if mode == "weights" else model,
        reward,
        args,
        dataset if dataset is not None else make_dataset(),
        processing_class=make_tokenizer(),
        callbacks=[recorder] if recorder else None,
    )


def assert_trains(trainer):
    """The guard lets it pass, step 0 is within its tolerance, every number is finite, and the weights move."""
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    *steps, _ = trainer.state.log_history
    assert len(steps) == trainer.args.max_steps
    # k3 = Δ²/2 for small Δ, and a normal Δ with E|Δ| = g has E Δ² = π/2 g²
    assert 0 <= steps[0]["query_kl"] < math.pi / 4 * TOLERANCE**2
    assert steps[-1]["query_kl"] > 2 * steps[0]["query_kl"]
    for step in steps:
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
        assert step["grad_norm"] > 0
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_trains_in_bfloat16(tmp_path, cache, mode, kind):
    trainer = make_trainer(tmp_path, mode, kind)
    assert json.loads(trainer.train_dataset[0]["ref_query_id"])["dtype"] == "bfloat16"
    assert {p.dtype for p in trainer.model.parameters()} == {torch.bfloat16 if mode == "weights" else torch.float32}
    assert_trains(trainer)


@pytest.mark.parametrize("mode", MODES)
def test_trains_in_bfloat16_with_checkpointing_and_accumulation(tmp_path, cache, mode):
    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "gradient_checkpointing": True}
    assert_trains(make_trainer(tmp_path, mode, **options))


@pytest.mark.parametrize("mode", MODES)
def test_float32_scores_in_bfloat16(tmp_path, cache, mode):
    scored = score_queries(make_dataset(), make_model("qwen2"), make_tokenizer())
    assert json.loads(scored[0]["ref_query_id"])["dtype"] == "float32"
    assert_trains(make_trainer(tmp_path, mode, dataset=scored))


def test_bfloat16_scores_in_float32(tmp_path, cache):
    scored = score_queries(make_dataset(), make_model("qwen2").to(torch.bfloat16), make_tokenizer())
    assert_trains(make_trainer(tmp_path, "float32", dataset=scored))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_another_models_scores_are_refused(tmp_path, cache, mode, dtype):
    scored = score_queries(make_dataset(), make_model("qwen2", seed=1).to(dtype), make_tokenizer())
    with pytest.raises(ValueError, match="policy in bfloat16.*the scores are another model's"):
        make_trainer(tmp_path, mode, dataset=scored).train()


# Gradients


def first_gradient(tmp_path, mode, rollout=None):
    """The gradient of the first step, flat, and the rollout that it is of; with α large and the policy adrift."""
    recorder = Recorder()
    trainer = make_trainer(tmp_path, mode, recorder=recorder, max_steps=1, query_kl_coef=1.0, max_grad_norm=0.0)
    if rollout is None:
        rollout = trainer._generate_and_score_completions(
            [row for row in trainer.train_dataset.select(range(2)) for _ in range(2)]
        )
        rollout["ref_query_logps"] += 0.5 * rollout["query_mask"]
    trainer._generate_and_score_completions = lambda inputs: dict(rollout)
    trainer._check_agreement = lambda gap: None
    trainer.train()
    return torch.cat([grad.flatten().double() for grad in recorder.grads[0].values()]), rollout


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_close_to_float32s(tmp_path, cache, mode):
    exact, rollout = first_gradient(tmp_path, "float32")
    rounded, _ = first_gradient(tmp_path, mode, rollout)
    assert rounded.isfinite().all() and exact.norm() > 0.1
    assert (rounded - exact).norm() / exact.norm() < 0.12
    assert torch.cosine_similarity(rounded, exact, dim=0) > 0.995


# The guard's tolerance


def gap(logps, others):
    return (logps - others).abs().mean().item()


def make_deep_model(layers, seed):
    config = make_model("qwen2").config.to_dict() | {"num_hidden_layers": layers, "layer_types": None}
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(Qwen2Config(**config)).float().eval()


@torch.no_grad()
def score(model, mode, prompts):
    """Log-probs of the tokens from the second on, one after the other."""
    model = copy.deepcopy(model).to(torch.bfloat16) if mode == "weights" else model
    ids = nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"), fused_lm_head(model, temperature=1.0):
        log_probs = model(
            input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), fused_lm_head=True
        ).log_probs
    return log_probs[mask[:, 1:].bool()].float()


@pytest.mark.parametrize("layers", [1, 2, 8, 24])
def test_the_tolerance_is_above_rounding_and_below_another_model(layers):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 259, (size,), generator=generator) for size in (40, 17, 64, 33)]
    model, other = (make_deep_model(layers, seed) for seed in (0, 1))
    exact = score(model, "float32", prompts)
    tolerance = agreement_tolerance(["float32", "bfloat16"], layers)
    for mode in MODES:
        rounded = score(model, mode, prompts)
        assert tolerance / 20 < gap(exact, rounded) < tolerance / 1.5
        assert gap(score(other, "float32", prompts), rounded) > 2 * tolerance
    one_by_one = torch.cat([score(model, "float32", [prompt]) for prompt in prompts])
    assert gap(exact, one_by_one) < agreement_tolerance(["float32"], layers) / 100


def test_the_tolerance_by_its_model_of_rounding():
    """Logits of standard deviation 4 around the target's 30, a hidden state with the error of 2L + 2 updates."""
    n_layers, size, samples = 28, 256, 4000
    torch.manual_seed(0)
    u = torch.finfo(torch.bfloat16).eps / 2
    values = 2 ** torch.rand(10**6)
    rms = ((values.bfloat16().float() / values - 1).square().mean().sqrt() / u).item()
    assert rms == pytest.approx(0.43, abs=0.01)
    assert 6**0.5 * rms == pytest.approx(1, abs=0.05)

    def log_prob_errors():
        error = torch.randn(samples, size) * u * (2 * n_layers + 2) ** 0.5 / size**0.5  # of a hidden state of size 1
        directions = torch.randn(2, size)
        directions = 4 * size**0.5 * directions / directions.norm(dim=1, keepdim=True)  # target, likeliest token
        target, likeliest = (error @ directions.T).unbind(1)
        return target - likeliest + 30 * rms * u * torch.randn(samples)

    measured = (log_prob_errors() - log_prob_errors()).abs().mean().item()
    assert agreement_tolerance(["bfloat16", "float32"], n_layers) == pytest.approx(measured, rel=0.06)


def test_the_tolerance_with_tf32():
    assert agreement_tolerance(["float32"], 28) == 1e-3
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        assert agreement_tolerance(["float32"], 28) == agreement_tolerance(["float16"], 28) > 0.02
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
