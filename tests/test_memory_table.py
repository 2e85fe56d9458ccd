"""The page of memory and cost: its numbers by other means, and that it is the script's output."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


ROOT = Path(__file__).parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("memory_table")


def test_the_page_is_the_scripts_output(script):
    assert (ROOT / "docs" / "memory.md").read_text() == script.page()


@pytest.mark.parametrize("name", ["Qwen2.5-Math-1.5B", "Qwen2.5-Math-7B", "Qwen2.5-32B"])
def test_parameters_are_those_of_the_model(script, name):
    model = script.MODELS[name]
    with torch.device("meta"):
        built = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=model.vocab,
                hidden_size=model.hidden,
                intermediate_size=model.intermediate,
                num_hidden_layers=model.layers,
                num_attention_heads=model.heads,
                num_key_value_heads=model.kv_heads,
                tie_word_embeddings=model.tied,
            )
        )
    assert model.parameters == built.num_parameters()
    assert model.layer == sum(p.numel() for p in built.model.layers[0].parameters())


def test_expected_distinct_prompts(script):
    assert script.expected_distinct(8, 8, 8) == 1
    assert script.expected_distinct(16, 1, 5) == 5
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randperm(32, generator=generator)[:8].div(4, rounding_mode="floor") for _ in range(4000)]
    mean = sum(len(draw.unique()) for draw in draws) / len(draws)
    assert script.expected_distinct(32, 4, 8) == pytest.approx(mean, rel=0.01)


def test_figures_by_hand(script):
    n = 10**9
    assert [script.states(n, backend, 8) / n for backend in script.BACKENDS] == [16, 20, 2, 3.75, 2]
    assert [script.reference(n, backend, 8) / n for backend in script.BACKENDS] == [4, 4, 0.5, 2, 0.25]
    model, batch = script.Model(10, 2, 2, 1, 30, 100, False), script.Batch(4, 6, 2, 3)
    assert batch.projected() == 8 and batch.projected(3) == 26
    cost = script.costs(model, batch)
    per_token = 2 * (2 * model.layer + 2 * 8 * 10)
    forward = 32 * per_token + 8 * 2 * 1000
    assert cost["ERPO"] == pytest.approx(5 + 4 * 18 * 2000 / forward)
    assert cost["ERPO, every row"] == pytest.approx(5 + 4 * 24 * 2000 / forward)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of the resident set from /proc")
def test_predicted_memory_is_what_is_measured(script):
    for row in script.check():
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.15), row["difference"]
