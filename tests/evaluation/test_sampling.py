"""Sampling back-ends: the distribution, the stops, the order, the seeds; the servers behind fakes."""

import json
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from erpo_trl.evaluation.sampling import (
    OpenAISampler,
    TransformersSampler,
    VLLMSampler,
    eos_token_ids,
    load_eos_token_ids,
    question_seed,
    tokenize_questions,
)
from erpo_trl.prompts import to_messages


UNK, EOS, END, A, B, C, D = range(7)  # the vocabulary of the bigram model


def draw(sampler, prompts, **options):
    options = {"n": 1, "temperature": 1.0, "seed": 0, "max_new_tokens": 8} | options
    return dict(sampler.sample(prompts, **options))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_frequencies_are_those_of_the_tempered_softmax(make_bigram, tokenizer, temperature):
    model = make_bigram({A: {B: 0.6, C: 0.3, D: 0.1}})
    # None of these may shape the sampling
    model.generation_config.update(top_k=1, top_p=0.1, min_p=0.9, repetition_penalty=9.0, temperature=0.01)
    n = 4000
    drawn = draw(TransformersSampler(model, tokenizer, 1000), [[A]], n=n, temperature=temperature)
    p = np.array([0.6, 0.3, 0.1]) ** (1 / temperature)
    p /= p.sum()
    counts = np.bincount([c.token_ids[0] for c in drawn[0]], minlength=11)[[B, C, D]]
    assert counts.sum() == n
    np.testing.assert_allclose(counts / n, p, atol=4 * np.sqrt(0.25 / n))


def test_greedy(make_bigram, tokenizer):
    model = make_bigram({A: {B: 0.4, C: 0.35, EOS: 0.25}, B: {C: 0.6, B: 0.4}})
    (completion,) = draw(TransformersSampler(model, tokenizer), [[A]], temperature=0)[0]
    assert completion.token_ids == [B, C, EOS] and not completion.truncated and completion.text == "b c"


def test_every_eos_stops_and_truncation_is_told(make_bigram, tokenizer):
    model = make_bigram({A: {END: 1.0}, B: {EOS: 1.0}, C: {C: 1.0}, D: {C: 1.0}})
    drawn = draw(TransformersSampler(model, tokenizer), [[A], [B], [C], [D]], max_new_tokens=5)
    assert [drawn[i][0].token_ids for i in range(4)] == [[END], [EOS], [C] * 5, [C] * 5]
    assert [drawn[i][0].truncated for i in range(4)] == [False, False, True, True]


def test_longest_first_in_batches_and_nothing_lost(make_bigram, tokenizer):
    model = make_bigram({})
    prompts = [[A], [A] * 9, [A] * 4]
    order = [
        i
        for i, _ in TransformersSampler(model, tokenizer, 2).sample(
            prompts, n=2, temperature=1.0, seed=0, max_new_tokens=3
        )
    ]
    assert order == [1, 2, 0] and model.batches == [(2, 9), (2, 4), (2, 1)]
    drawn = draw(TransformersSampler(model, tokenizer, 3), prompts, n=5)
    assert {i: len(completions) for i, completions in drawn.items()} == {0: 5, 1: 5, 2: 5}


def test_padding_does_not_change_greedy_decoding(tokenizer):
    from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    for model in (
        GPT2LMHeadModel(GPT2Config(vocab_size=7, n_embd=16, n_layer=2, n_head=2, n_positions=64, eos_token_id=1)),
        Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=7,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                eos_token_id=1,
            )
        ),
    ):
        prompts = [[A, B, C, D, A, A, B], [D], [C, A, B]]
        together = draw(TransformersSampler(model, tokenizer), prompts, temperature=0)
        for i, prompt in enumerate(prompts):
            ids = list(prompt)
            while len(ids) < len(prompt) + 8 and ids[-1:] != [EOS]:  # the naive way, one forward per token
                ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
            assert together[i][0].token_ids == ids[len(prompt) :]


def test_seeded_and_leaves_no_trace(make_bigram, tokenizer):
    model = make_bigram({A: {B: 0.5, C: 0.5}, B: {A: 1.0}, C: {A: 1.0}}).train()
    sampler = TransformersSampler(model, tokenizer)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    first, again = draw(sampler, [[A]], n=4), draw(sampler, [[A]], n=4)
    assert first == again != draw(sampler, [[A]], n=4, seed=1)
    assert model.training and model.dropout.training
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


def test_too_long_for_the_model(make_bigram, tokenizer):
    with pytest.raises(ValueError, match=r"Question 1: prompt of 510 tokens.*512 positions; use max_new_tokens <= 2"):
        draw(TransformersSampler(make_bigram({}), tokenizer), [[A], [A] * 510])


def test_eos(tokenizer, tmp_path, make_bigram):
    assert eos_token_ids(tokenizer, GenerationConfig(eos_token_id=[2, 6])) == [EOS, 2, 6]
    assert eos_token_ids(tokenizer, GenerationConfig()) == [EOS]
    make_bigram({}).generation_config.save_pretrained(tmp_path)
    assert load_eos_token_ids(str(tmp_path), tokenizer) == [EOS, END]
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="end-of-sequence"):
        eos_token_ids(tokenizer, GenerationConfig())


def test_tokenize_questions_with_and_without_chat_template(tokenizer):
    text = to_messages(" a b ")[0]["content"]
    assert tokenize_questions(tokenizer, [" a b "]) == [tokenizer(text)["input_ids"]]
    tokenizer.chat_template = (
        "{% for m in messages %}c {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}d{% endif %}{% if thinking %} c{% endif %}"
    )
    plain = tokenizer(text)["input_ids"]
    assert tokenize_questions(tokenizer, ["a b"]) == [[C, *plain, D]]
    assert tokenize_questions(tokenizer, ["a b"], {"thinking": True}) == [[C, *plain, D, C]]


@pytest.fixture
def model_folder(make_bigram, tmp_path):
    make_bigram({}).generation_config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_vllm(monkeypatch, tokenizer, model_folder):
    seen = {}

    class LLM:
        def __init__(self, **kwargs):
            seen["llm"] = kwargs
            self.model_config = SimpleNamespace(max_model_len=10)

        def generate(self, prompts, params):
            seen["prompts"], seen["params"] = prompts, params
            samples = [
                SimpleNamespace(text="a", token_ids=(A, EOS), finish_reason="stop"),
                SimpleNamespace(text="b b", token_ids=(B, B), finish_reason="length"),
            ]
            return [SimpleNamespace(outputs=samples) for _ in prompts]

    fake = ModuleType("vllm")
    fake.LLM, fake.SamplingParams = LLM, lambda **kwargs: kwargs
    monkeypatch.setitem(sys.modules, "vllm", fake)
    sampler = VLLMSampler(model_folder, tokenizer, tensor_parallel_size=2)
    drawn = draw(sampler, [[A], [B]], n=2, seed=3, temperature=0.6)
    assert seen["llm"] == {"model": model_folder, "tensor_parallel_size": 2}
    assert seen["prompts"] == [{"prompt_token_ids": [A]}, {"prompt_token_ids": [B]}]
    common = {"n": 2, "temperature": 0.6, "top_p": 1.0, "max_tokens": 8, "stop_token_ids": [EOS, END]}
    assert seen["params"] == [common | {"seed": question_seed(3, i, 2)} for i in range(2)]
    assert [(c.text, c.token_ids, c.truncated) for c in drawn[1]] == [("a", [A, EOS], False), ("b b", [B, B], True)]
    assert len(draw(sampler, [[A, B]], n=2)) == 1  # 2 + 8 tokens fill the 10 positions
    with pytest.raises(ValueError, match="Question 1: prompt of 3 tokens .* max_new_tokens <= 7"):
        draw(sampler, [[A], [A, B, A]], n=2)


def test_vllm_missing(monkeypatch, tokenizer):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"erpo-trl\[vllm\]"):
        VLLMSampler("any", tokenizer)


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.server.bodies.append((self.path, self.headers["Authorization"], body))
            if body["prompt"] == [D]:
                self.send_error(400, "bad prompt")
                return
            choices = [
                {"index": j, "text": f"a {'b ' * j}".strip(), "finish_reason": "length" if j else "stop"}
                for j in range(body["n"])
            ]
            payload = json.dumps({"choices": choices}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.bodies = []
        Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_openai_server(server, monkeypatch, tokenizer, model_folder):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    sampler = OpenAISampler(url, model_folder, tokenizer, served_name="served")
    drawn = draw(sampler, [[A], [B, C]], n=2, temperature=0.6, seed=1)
    assert [(c.text, c.token_ids, c.truncated) for c in drawn[1]] == [("a", [A, EOS], False), ("a b", [A, B], True)]
    path, key, body = next(entry for entry in server.bodies if entry[2]["prompt"] == [B, C])
    assert (path, key) == ("/v1/completions", "Bearer secret")
    assert body == {
        "model": "served",
        "prompt": [B, C],
        "n": 2,
        "temperature": 0.6,
        "top_p": 1,
        "max_tokens": 8,
        "seed": question_seed(1, 1, 2),
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [EOS, END],
    }
    strict = OpenAISampler(url, model_folder, tokenizer, extra_body={})
    draw(strict, [[A]])
    assert "top_k" not in server.bodies[-1][2]
    with pytest.raises(RuntimeError, match="answered 400"):
        draw(sampler, [[D]])


def test_openai_no_server(tokenizer, model_folder):
    with pytest.raises(RuntimeError, match="--base_url"):
        draw(OpenAISampler("http://127.0.0.1:9/v1", model_folder, tokenizer), [[A]])


def test_samples_of_one_run_share_no_seed():
    seeds = [question_seed(7, q, 32) + j for q in range(700) for j in range(32)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**63
