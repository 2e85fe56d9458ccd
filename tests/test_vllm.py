"""vLLM: scoring with it agrees with transformers, and ERPO trains with its rollouts (where it is installed)."""

import math
import os
import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from erpo_trl import ERPOConfig, ERPOTrainer, score_queries
from erpo_trl.prompts import to_messages
from erpo_trl.query_likelihood import QuerySpan, common_span, fused_lm_head, prompt_tokenizer, score_token_ids
from erpo_trl.scoring import ScoreIdentity
from erpo_trl.tiny import MODEL_PATH, load_arithmetic
from erpo_trl.vllm_scoring import vllm_reference


@pytest.fixture
def vllm():
    """vLLM, on CPU with 1 GB for its cache and no pinned threads; what it does to the process is undone."""
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with mock.patch.dict(os.environ, settings):
        yield pytest.importorskip("vllm")
        from vllm.distributed import cleanup_dist_env_and_memory

        cleanup_dist_env_and_memory()


@pytest.fixture
def fake_vllm(monkeypatch):
    """An engine for which token t of a prompt has log-prob -t - token / 1000; keeps what it is asked."""
    asked = []

    class LLM:
        def __init__(self, **kwargs):
            asked.append(kwargs)
            self.model_config = SimpleNamespace(max_model_len=6)
            core = SimpleNamespace(shutdown=lambda: asked.append("shutdown"))
            self.llm_engine = SimpleNamespace(engine_core=core)

        def generate(self, prompts, params, use_tqdm):
            asked.append((prompts, params))
            return [
                SimpleNamespace(
                    prompt_logprobs=[
                        {token: SimpleNamespace(logprob=-t - token / 1000)} if t else None
                        for t, token in enumerate(prompt["prompt_token_ids"])
                    ]
                )
                for prompt in prompts
            ]

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "vllm", module)
    return asked


def test_scored_tokens_are_those_of_the_span(fake_vllm):
    prompts = [np.array([7, 8, 9, 10, 11], dtype=np.int32), np.array([7, 8, 5, 11], dtype=np.int32)]
    with vllm_reference("folder", "float32", max_model_len=6, engine_kwargs={"enforce_eager": True}) as score:
        long, short = score(prompts, QuerySpan(2, 1))
        whole = score(prompts[1:], QuerySpan())[0]
    np.testing.assert_allclose(long, [-2.009, -3.010], rtol=1e-6)
    np.testing.assert_allclose(short, [-2.005], rtol=1e-6)
    np.testing.assert_allclose(whole, [-1.008, -2.005, -3.011], rtol=1e-6)
    assert {array.dtype for array in (long, short, whole)} == {np.dtype("float32")}
    engine, (fed, params), _, end = fake_vllm
    assert engine == {
        "model": "folder",
        "dtype": "float32",
        "tensor_parallel_size": 1,
        "max_model_len": 6,
        "logprobs_mode": "raw_logprobs",
        "enforce_eager": True,
    }
    assert fed == [{"prompt_token_ids": [7, 8, 9, 10]}, {"prompt_token_ids": [7, 8, 5]}]
    assert params["prompt_logprobs"] == 0 and params["max_tokens"] == 1
    assert end == "shutdown"


def test_prompt_without_room_for_a_token(fake_vllm):
    with vllm_reference("folder", "float32") as score:
        assert len(score([np.arange(5)], QuerySpan())[0]) == 4
        assert len(score([np.arange(6)], QuerySpan(1, 1))[0]) == 4
        with pytest.raises(ValueError, match="Prompt 1 .* 6 tokens long, and vLLM takes 5 .*`max_model_len` to 7"):
            score([np.arange(5), np.arange(6)], QuerySpan())


def test_engine_is_shut_down_after_an_error(fake_vllm):
    with pytest.raises(KeyError), vllm_reference("folder", "float32"):
        raise KeyError
    assert fake_vllm[-1] == "shutdown"


def test_what_vllm_cannot_score(monkeypatch, fake_vllm):
    with pytest.raises(ValueError, match="`temperature` is 0.6"), vllm_reference("any", "float32", 0.6):
        pass
    with pytest.raises(ValueError, match="`dtype` is 'auto'"), vllm_reference("any", "auto"):
        pass
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"erpo-trl\[vllm\]"), vllm_reference("any", "float32"):
        pass


def arithmetic_prompts(count):
    rows = load_arithmetic("test").select(range(count))
    return [to_messages(question) for question in rows["question"]]


def transformers_scores(prompts, span):
    model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32).eval()
    with fused_lm_head(model, 1.0):
        return score_token_ids(model, torch.device("cpu"), prompts, span)


@pytest.mark.slow
def test_vllm_scores_are_the_transformers_scores(vllm):
    token_ids = prompt_tokenizer(AutoTokenizer.from_pretrained(MODEL_PATH))(arithmetic_prompts(40))
    prompts = [np.array(ids, dtype=np.int32) for ids in token_ids]
    with vllm_reference(MODEL_PATH, "float32", max_model_len=256, engine_kwargs={"enforce_eager": True}) as score:
        # The second is asked for what a prefix cache would have by then
        for scope, span in {"query": common_span(prompts), "prompt": QuerySpan()}.items():
            found, expected = score(prompts, span), transformers_scores(prompts, span)
            assert [a.shape for a in found] == [(span.n_scored(len(ids)),) for ids in prompts]
            gap = max(np.abs(a - b).max() for a, b in zip(found, expected, strict=True))
            print(f"{scope}: max {gap:.2e} nats over {sum(map(len, found))} tokens of {len(prompts)} prompts")
            assert gap < 1e-3


@pytest.mark.slow
def test_score_queries_with_vllm(vllm, tmp_path):
    dataset = Dataset.from_dict({"prompt": arithmetic_prompts(40)})
    by_transformers = score_queries(dataset, MODEL_PATH, cache_dir=tmp_path / "transformers")
    engine = {"max_model_len": 256, "engine_kwargs": {"enforce_eager": True}}
    by_vllm = score_queries(dataset, MODEL_PATH, cache_dir=tmp_path / "vllm", backend="vllm", vllm_kwargs=engine)
    for column in ("ref_query_logp", "query_weight"):
        gap = np.abs(np.array(by_vllm[column]) - np.array(by_transformers[column])).max()
        print(f"{column}: max difference {gap:.2e}")
        assert gap < 1e-3
    identities = [ScoreIdentity.parse(scored["ref_query_id"][0]) for scored in (by_vllm, by_transformers)]
    assert identities[0].mean_nll == pytest.approx(identities[1].mean_nll, abs=1e-4)
    assert identities[0].span == identities[1].span and identities[0].dtype == identities[1].dtype == "float32"


def reward(completions, **kwargs):
    """Any deterministic function of the completion."""
    return [float(sum(map(ord, completion[0]["content"])) % 7) for completion in completions]


@pytest.mark.slow
def test_colocate_rollouts(vllm, tmp_path, cache, monkeypatch):
    """Rollouts from vLLM, with the importance-sampling correction: two optimizer steps."""
    from trl.generation import vllm_generation

    # On CPU, vLLM's oneDNN layers take no new weights
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False, raising=False)
    engine = partial(vllm.LLM, dtype="float32", enforce_eager=True)
    monkeypatch.setattr(vllm_generation, "LLM", engine)
    args = ERPOConfig(
        output_dir=str(tmp_path),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        report_to=[],
        save_strategy="no",
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=16,
        max_steps=2,
        logging_steps=1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        gradient_checkpointing=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=256,
        vllm_importance_sampling_correction=True,
    )
    dataset = Dataset.from_dict({"prompt": arithmetic_prompts(16)})
    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    trainer = ERPOTrainer(MODEL_PATH, reward, args, dataset, processing_class=tokenizer)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    first, second = [log for log in trainer.state.log_history if "query_kl" in log]
    keys = ["loss", "grad_norm", "query_kl", "query_nll", "query_weight/mean"]
    keys += [f"sampling/sampling_logp_difference/{x}" for x in ("mean", "max")]
    keys += [f"sampling/importance_sampling_ratio/{x}" for x in ("min", "mean", "max")]
    for key in keys:
        print(f"{key}: {first[key]:.3g}, {second[key]:.3g}")
    assert all(math.isfinite(log[key]) for log in (first, second) for key in keys)
    assert any((p.detach().cpu() != before[name].cpu()).any() for name, p in trainer.model.named_parameters())
    assert abs(first["query_kl"]) < 1e-6 < 1e-4 < second["query_kl"]
    # After the update too: vLLM samples from the policy as it is now
    for log in (first, second):
        assert log["sampling/sampling_logp_difference/max"] < 1e-3
        assert abs(log["sampling/importance_sampling_ratio/mean"] - 1) < 1e-3
