"""`score_queries` against naive loops, against what the trainer trains on, and against misuse."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDatasetDict, Value, load_dataset
from helpers import CHAT_TEMPLATE, make_model, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, BioGptConfig, LlamaConfig, OPTConfig, XGLMConfig

from erpo_trl import ERPOConfig, ERPOTrainer, score_queries
from erpo_trl.query_likelihood import (
    QuerySpan,
    common_span,
    fused_lm_head,
    has_learned_absolute_positions,
    score_token_ids,
)
from erpo_trl.scoring import SCORE_COLUMNS, ScoreIdentity


QUESTIONS = ["What is 1+1?", "Compute 22*3.", "hi", "What is 1+1?", "Solve x+4=9 now", "7-5"]
# With the byte-level tokenizer and the template of helpers: "<s>" + "user: " before, "</s><s>assistant: " after
N_BEFORE, N_AFTER = 1 + len("user: "), 2 + len("assistant: ")


def user(text, system=None):
    turns = [{"role": "system", "content": system}] if system is not None else []
    return [*turns, {"role": "user", "content": text}]


def make_dataset(questions=QUESTIONS, **columns):
    return Dataset.from_dict({"prompt": [user(q) for q in questions], **columns})


def make_any_model(kind):
    if kind in ("llama", "qwen2", "gpt2"):
        return make_model(kind)
    size = {"num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512}
    special = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = {
        "opt": OPTConfig(hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, init_std=0.2, **size, **special),
        "biogpt": BioGptConfig(hidden_size=32, intermediate_size=64, initializer_range=0.2, **size, **special),
        "xglm": XGLMConfig(d_model=32, ffn_dim=64, init_std=0.2, **size, **special),
    }[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().eval()


@torch.no_grad()
def naive_logps(model, ids, start, end, temperature=1.0):
    """One prompt at a time, no padding, its own softmax."""
    logits = model(torch.tensor([ids])).logits[0].double() / temperature  # (T, V)
    probs = torch.exp(logits) / torch.exp(logits).sum(dim=-1, keepdim=True)
    return [torch.log(probs[t - 1, ids[t]]).item() for t in range(start, len(ids) - end)]


@contextmanager
def counted_forwards(model, calls=None):
    """The shapes of the batches that the model is called with."""
    calls = [] if calls is None else calls
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


@pytest.fixture
def loaded_forwards(monkeypatch):
    """The same for every model that is loaded from a folder from here on."""
    calls, load = [], AutoModelForCausalLM.from_pretrained

    def from_pretrained(*args, **kwargs):
        model = load(*args, **kwargs)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: calls.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return calls


def token_ids(tokenizer, prompts, **kwargs):
    if isinstance(prompts[0], str):
        return [tokenizer(prompt)["input_ids"] for prompt in prompts]
    return [
        tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True, **kwargs)["input_ids"]
        for prompt in prompts
    ]


def scores_of(dataset):
    return {column: dataset[column][:] for column in SCORE_COLUMNS}


def approx(values, **kwargs):
    return pytest.approx(values, **{"rel": 1e-4, "abs": 1e-5} | kwargs)


# The numbers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "opt"])
def test_log_probs_are_those_of_a_naive_loop(cache, tokenizer, kind, temperature):
    model, dataset = make_any_model(kind), make_dataset()
    for scope, start, end in [("query", N_BEFORE, N_AFTER), ("prompt", 1, 0)]:
        scored = score_queries(dataset, model, tokenizer, temperature=temperature, query_scope=scope, batch_tokens=150)
        sums = []
        for ids, row in zip(token_ids(tokenizer, dataset["prompt"]), scored, strict=True):
            want = naive_logps(model, ids, start, end, temperature)
            sums.append(sum(want))
            assert row["ref_query_logps"] == approx(want)
            assert row["ref_query_logp"] == approx(sum(want))
        mean = sum(sums) / len(sums)
        assert scored["query_weight"][:] == approx([min(max(mean / s, 0.5), 2.0) for s in sums])
        identity = ScoreIdentity.parse(scored[0]["ref_query_id"])
        assert (identity.start, identity.end, identity.scope) == (start, end, scope)
        assert identity.temperature == temperature and identity.mean_nll == approx(-mean)
        assert len(set(scored["ref_query_id"])) == 1


def test_bf16_model_has_its_log_softmax_in_float32(cache, tokenizer):
    model, dataset = make_model().to(torch.bfloat16), make_dataset()
    scored = score_queries(dataset, model, tokenizer, query_scope="prompt", batch_tokens=1)  # one row per forward
    n_exact = n_tokens = 0
    for ids, row in zip(token_ids(tokenizer, dataset["prompt"]), scored, strict=True):
        logps = row["ref_query_logps"]
        assert logps == approx(naive_logps(model, ids, 1, 0), abs=1e-5)  # of the same bf16 logits
        n_exact += sum(x == torch.tensor(x).bfloat16().item() for x in logps)
        n_tokens += len(logps)
    assert n_exact < n_tokens / 10  # float32 log-probs, not bf16 ones in a wider box
    assert ScoreIdentity.parse(scored[0]["ref_query_id"]).dtype == "bfloat16"


def test_columns_are_float32(cache, tokenizer):
    scored = score_queries(make_dataset(), make_model(), tokenizer)
    assert scored.column_names == ["prompt", *SCORE_COLUMNS]
    assert scored.features["ref_query_logps"].feature == Value("float32")
    assert scored.features["ref_query_logp"] == scored.features["query_weight"] == Value("float32")
    assert scored.features["ref_query_id"] == Value("string")


def test_weight_options(cache, tokenizer):
    dataset, model = make_dataset(), make_model()
    nll = -np.array(score_queries(dataset, model, tokenizer)["ref_query_logp"], dtype=np.float64)
    narrow = np.clip(nll.mean() / nll, 0.8, 1.1)
    assert len(set(narrow)) > 2  # both clips and something in between
    scored = score_queries(dataset, model, tokenizer, weight_min=0.8, weight_max=1.1)
    assert scored["query_weight"][:] == approx(narrow.tolist())
    scored = score_queries(dataset, model, tokenizer, weight_min=0.8, weight_max=1.1, normalize_weight=True)
    assert scored["query_weight"][:] == approx((narrow / narrow.mean()).tolist())
    scored = score_queries(dataset, model, tokenizer, mean_nll=20.0)
    assert scored["query_weight"][:] == approx(np.clip(20 / nll, 0.5, 2).tolist())


def enumerated_span(prompts):
    """The definition, tried out: the largest prefix, then suffix, that all share and that leaves each a token."""
    shortest = min(map(len, prompts))

    def shared(n, end):
        return len({tuple(p[len(p) - n :] if end else p[:n]) for p in prompts}) == 1

    start = max(1, max(n for n in range(shortest) if shared(n, end=False)))
    return start, max(n for n in range(shortest - start) if shared(n, end=True))


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 3, 9, 8], [1, 2, 4, 5, 9, 8]],
        [[1, 2, 3], [1, 2, 3, 3]],  # one is a prefix of the other, and the suffix overlaps
        [[1, 2, 3, 4], [4, 2, 3, 4]],  # no common prefix: the first token is dropped all the same
        [[7, 1], [7, 2], [7, 2, 2]],
        [[5, 5, 5], [5, 5, 5, 5], [5, 5, 5, 5, 5]],
        [[1, 2], [3, 2]],  # only the first token varies, and it is never scored
    ],
)
def test_span_is_the_definition(prompts):
    span = common_span([np.array(p) for p in prompts])
    assert (span.start, span.end) == enumerated_span(prompts)
    assert all(span.n_scored(len(p)) >= 1 for p in prompts)


def test_a_set_in_which_nothing_varies_scores_the_whole_prompt_and_says_so(cache, tokenizer, caplog):
    with caplog.at_level("WARNING"), propagating_logs():
        scored = score_queries(make_dataset(["same", "same"]), make_model(), tokenizer)
    assert "query_scope='prompt'" in caplog.text
    whole = score_queries(make_dataset(["same", "same"]), make_model(), tokenizer, query_scope="prompt")
    assert scored["ref_query_logps"][:] == whole["ref_query_logps"][:]
    assert scored["query_weight"][:] == [1.0, 1.0]


@contextmanager
def propagating_logs():
    """`datasets` keeps its log messages from the root logger, where pytest listens."""
    from datasets.utils import logging

    logging.enable_propagation()
    try:
        yield
    finally:
        logging.disable_propagation()


@pytest.mark.parametrize("scope", ["query", "prompt"])
def test_the_first_token_is_never_scored(cache, tokenizer, scope):
    """Strings that share nothing: the query scope can drop no template, and still leaves the first token out."""
    texts = ["abc", "xyzzy", "01"]
    scored = score_queries(Dataset.from_dict({"prompt": texts}), make_model(), tokenizer, query_scope=scope)
    assert [len(row) for row in scored["ref_query_logps"]] == [len(text) - 1 for text in texts]


# The tokens are those of the trainer


BOS_TEMPLATE = "{{ bos_token }}" + CHAT_TEMPLATE
KWARGS_TEMPLATE = "{% if thinking %}<s>think hard</s>{% endif %}" + CHAT_TEMPLATE
ODD = ["naïve Ωμέγα 数学 🙂?", "trailing  ", "\n\ttabs\n ", " lead", "plain", "plain"]


def multiply(a: int, b: int) -> int:
    """
    Multiplies two integers.

    Args:
        a: The first factor.
        b: The second factor.
    """
    return a * b


def training_template(name):
    from importlib.resources import files

    return (files("trl") / "chat_templates" / f"{name}.jinja").read_text()


SETUPS = {
    "conversational": {},
    "plain strings": {"prompts": ODD},
    "system turns": {"prompts": [user(q, system="You are Σ. ") for q in ODD]},
    "template kwargs": {"template": KWARGS_TEMPLATE, "chat_template_kwargs": {"thinking": True}},
    "strings, BOS added": {"prompts": ODD, "add_bos": True},
    "conversational, BOS added": {"add_bos": True},
    "BOS added and in the template": {"template": BOS_TEMPLATE, "add_bos": True},
    "tools": {"template": training_template("qwen2_5"), "tools": [multiply]},
    "tools, template replaced by TRL": {
        "template": training_template("qwen3"),
        "tools": [multiply],
        # The template that TRL puts in its place differs in the turns before
        "prompts": [[*user("Hi"), {"role": "assistant", "content": "Hello"}, *user(q)] for q in ODD],
    },
}


def reward(completions, **kwargs):
    return [float(i % 3) for i in range(len(completions))]


def make_trainer(tmp_path, dataset, tokenizer, model=None, tools=None, **options):
    defaults = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "max_steps": 2,
        "learning_rate": 1e-2,
    }
    args = ERPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        **defaults | options,
    )
    return ERPOTrainer(model or make_model(), reward, args, dataset, processing_class=tokenizer, tools=tools)


def rollout(trainer, rows):
    """What the trainer makes of some rows: its own tensors, without a generation's randomness mattering."""
    with torch.no_grad():
        return trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize("setup", SETUPS)
def test_token_ids_are_those_trained_on(cache, tmp_path, setup):
    options = {"prompts": [user(q) for q in ODD], "template": CHAT_TEMPLATE, "add_bos": False} | SETUPS[setup]
    tokenizer = make_tokenizer(options["template"], add_bos=options["add_bos"])
    tools, kwargs = options.get("tools"), options.get("chat_template_kwargs")
    dataset = Dataset.from_dict({"prompt": options["prompts"]})
    model = make_model()
    model.config.max_position_embeddings = 4096  # tools take a byte-level tokenizer a thousand tokens
    with fed_rows(model) as fed:
        scored = score_queries(
            dataset, model, tokenizer, query_scope="prompt", chat_template_kwargs=kwargs, tools=tools
        )
    args = {"query_scope": "prompt", "chat_template_kwargs": kwargs}
    trainer = make_trainer(tmp_path, scored, tokenizer, model, tools, **args)
    assert (trainer.chat_template is not None) == ("replaced" in setup)
    rows = [row for row in scored for _ in range(2)]
    batch = rollout(trainer, rows)
    trained = [ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)]
    assert sorted(fed) == sorted(set(map(tuple, trained)))  # each prompt once, and nothing else
    for row, ids in zip(rows, trained, strict=True):
        assert row["ref_query_logps"] == approx(naive_logps(model, ids, 1, 0))
        assert ids.count(1) == number_of_bos(setup, row["prompt"])


@contextmanager
def fed_rows(model):
    """The token ids, without padding, of every row that the model is called with."""
    rows = []

    def hook(module, args, kwargs):
        for ids, mask in zip(kwargs["input_ids"], kwargs["attention_mask"], strict=True):
            rows.append(tuple(ids[mask.bool()].tolist()))

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def number_of_bos(setup, prompt):
    """`<s>` opens each turn in the template of helpers, and the answer; a BOS comes once before them, if at all."""
    if "tools" in setup:
        return 0
    if isinstance(prompt, str):
        return int("BOS" in setup)
    return len(prompt) + 1 + (setup in ("BOS added and in the template", "template kwargs"))


# Batches


def test_equal_prompts_are_scored_once_and_rows_keep_their_order(cache, tokenizer):
    rng = random.Random(0)
    texts = [str(n) * (1 + n % 7) for n in range(12)]
    questions = [rng.choice(texts) for _ in range(60)]
    model, dataset = make_model(), make_dataset(questions, answer=list(range(60)))
    with fed_rows(model) as fed:
        scored = score_queries(dataset, model, tokenizer, batch_tokens=100)
    assert len(fed) == len(set(fed)) == len(set(questions))
    assert scored["answer"][:] == list(range(60)) and scored["prompt"][:] == dataset["prompt"][:]
    alone = {
        text: naive_logps(model, ids, N_BEFORE, N_AFTER)
        for text, ids in zip(questions, token_ids(tokenizer, dataset["prompt"]), strict=True)
    }
    for text, logps in zip(questions, scored["ref_query_logps"], strict=True):
        assert logps == approx(alone[text])


def test_batches_are_longest_first_and_within_the_token_budget(cache, tokenizer):
    questions = ["x" * n for n in (3, 40, 1, 22, 9, 300, 17, 5, 2, 30)]
    model = make_model()
    with counted_forwards(model) as shapes:
        score_queries(make_dataset(questions), model, tokenizer, batch_tokens=120, query_scope="prompt")
    lengths = sorted((len(q) + N_BEFORE + N_AFTER for q in questions), reverse=True)
    assert sum(rows for rows, _ in shapes) == len(questions)
    assert all(rows * length <= 120 for rows, length in shapes[1:])
    assert shapes[0] == (1, lengths[0])  # longer than the budget: alone
    widths = [length for rows, length in shapes for _ in range(rows)]
    assert widths == sorted(widths, reverse=True) and all(w >= n for w, n in zip(widths, lengths, strict=True))


def test_the_template_after_the_query_is_not_even_fed(cache, tokenizer):
    model, long = make_model(), "a long enough query"
    with counted_forwards(model) as shapes:
        score_queries(make_dataset(["ab", long]), model, tokenizer)
    assert max(length for _, length in shapes) == N_BEFORE + len(long)


class LargestTensor(TorchDispatchMode):
    """The most elements that any operation puts out."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_no_logits_of_rows_by_tokens_by_vocabulary():
    vocab, rows, length = 100_000, 4, 16
    model = wide_model(vocab)
    prompts = [np.arange(1, length + 1, dtype=np.int32) + row for row in range(rows)]
    with fused_lm_head(model, 1.0), LargestTensor() as largest:
        logps = score_token_ids(model, torch.device("cpu"), prompts, QuerySpan())
    # Tiles of some of the vocabulary at most
    assert largest.numel < rows * (length - 1) * vocab / 2
    with LargestTensor() as naive:
        want = naive_logps(model, prompts[2].tolist(), 1, 0)
    assert naive.numel >= length * vocab  # the instrument sees what it should
    assert logps[2].tolist() == approx(want)


def wide_model(vocab):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    return AutoModelForCausalLM.from_config(config).eval()


def test_scores_do_not_depend_on_the_batches(cache, tokenizer, tmp_path):
    """Padding included, for positions that are counted by column and by attention mask."""
    for kind in ("gpt2", "opt"):
        model = make_any_model(kind)
        one, many = (
            score_queries(make_dataset(), model, tokenizer, batch_tokens=n, cache_dir=tmp_path / f"{kind}{n}")
            for n in (1, 10_000)
        )
        for a, b in zip(one["ref_query_logps"], many["ref_query_logps"], strict=True):
            assert a == approx(b)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "opt", "biogpt", "xglm"])
def test_models_that_left_padding_disturbs_are_known(kind):
    """The trainer pads on the left and passes no position ids; it refuses these."""
    model, ids = make_any_model(kind), torch.arange(5, 25)[None]
    padded, mask = torch.cat([torch.zeros_like(ids), ids], dim=1), torch.arange(40)[None] >= 20
    want, got = (
        model(input_ids=rows, attention_mask=mask[:, -rows.size(1) :].long()).logits[0, -20:] for rows in (ids, padded)
    )
    disturbed = (want - got).abs().max().item() > 1e-4
    assert disturbed == has_learned_absolute_positions(model) == (kind in ("gpt2", "biogpt", "xglm"))


def test_progress_bar_counts_tokens(cache, tokenizer, monkeypatch, capsys):
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    score_queries(make_dataset(), make_model(), tokenizer)
    n_tokens = sum(len(ids) for ids in set(map(tuple, token_ids(tokenizer, make_dataset()["prompt"]))))
    bar = capsys.readouterr().err
    assert "Scoring train prompts: 100%" in bar and f"{n_tokens}/{n_tokens}" in bar and "tok/s" in bar


# Nothing else is touched


def save(folder, model, tokenizer):
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def draw(*_):
    """Takes a number from every global generator."""
    random.random(), np.random.rand(), torch.rand(1)


@pytest.mark.parametrize("given", ["module", "folder"])
def test_random_states_are_untouched(cache, tokenizer, tmp_path, monkeypatch, given):
    model = make_model()
    draws = []
    model.register_forward_hook(lambda *_: draws.append(draw()))
    reference = model
    if given == "folder":
        reference = save(tmp_path / "model", model, tokenizer)
        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: (draw(), model)[1])
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    score_queries(make_dataset().shuffle(seed=0), reference, tokenizer)
    assert draws
    assert random.getstate() == before[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), before[1], strict=True))
    assert torch.equal(torch.get_rng_state(), before[2])


def test_the_module_is_left_as_it_was(cache, tokenizer):
    model = make_model().train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    score_queries(make_dataset(), model, tokenizer)
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert "forward" not in model.__dict__ and all(p.grad is None for p in model.parameters())


def test_active_dropout_does_not_act(cache, tokenizer):
    model = make_model(attention_dropout=0.5)
    want = score_queries(make_dataset(), model, tokenizer, cache_dir=cache / "eval")
    got = score_queries(make_dataset(), model.train(), tokenizer, cache_dir=cache / "train")
    assert scores_of(got) == scores_of(want)


def test_training_after_scoring_is_training_on_a_scored_set(cache, tokenizer, tmp_path):
    folder = save(tmp_path / "model", make_model(), tokenizer)
    earlier = score_queries(make_dataset(), folder, tokenizer)

    def parameters(scored=None):
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_pretrained(folder)
        # Another cache: these are scored for real, between the seed and the training
        scored = scored or score_queries(make_dataset(), folder, tokenizer, cache_dir=cache / "other")
        trainer = make_trainer(tmp_path, scored, tokenizer, model)
        trainer.train()
        return dict(trainer.model.named_parameters())

    a, b = parameters(), parameters(earlier)
    initial = dict(make_model().named_parameters())
    assert a.keys() == b.keys() == initial.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not all(torch.equal(a[name], initial[name]) for name in a)


# The cache


def test_second_call_makes_no_forward(cache, tokenizer):
    model, dataset = make_model(), make_dataset()
    with counted_forwards(model) as calls:
        first = score_queries(dataset, model, tokenizer)
        assert calls
        calls.clear()
        again = score_queries(Dataset.from_list(dataset.to_list()), model, make_tokenizer())
        assert not calls
        score_queries(dataset, make_model(), tokenizer, weight_max=3.0, mean_nll=7.0)  # of the weight only
        assert not calls
    assert scores_of(first) == scores_of(again)
    assert not dataset.cache_files
    assert [path.suffix for path in cache.glob("*/*")] == [".npz"]  # merged, and nothing left behind


def test_second_call_from_a_folder_loads_no_model(cache, tokenizer, tmp_path, loaded_forwards):
    folder = save(tmp_path / "model", make_model(), tokenizer)
    first = score_queries(make_dataset(), folder)
    assert loaded_forwards
    AutoModelForCausalLM.from_pretrained = None  # undone by the fixture's monkeypatch
    assert scores_of(score_queries(make_dataset(), folder)) == scores_of(first)


def change_weights(model, tokenizer):
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    return {}


def change_tokenizer(model, tokenizer):
    return {"tokenizer": make_tokenizer(add_bos=True)}


def change_template(model, tokenizer):
    tokenizer.chat_template += "{# the same token ids #}"
    return {}


def change_config(model, tokenizer):
    model.config.rms_norm_eps = 1e-2
    return {}


CHANGES = {
    "weights": change_weights,
    "config": change_config,
    "tokenizer": change_tokenizer,
    "template": change_template,
    "template kwargs": lambda *_: {"chat_template_kwargs": {"unused": 1}},
    "tools": lambda *_: {"tools": [multiply]},
    "temperature": lambda *_: {"temperature": 0.7},
    "scope": lambda *_: {"query_scope": "prompt"},
    "span": lambda *_: {"span": (3, 2)},
    "dtype": lambda model, _: model.to(torch.bfloat16) and {},
    "rows": lambda *_: {"dataset": make_dataset([*QUESTIONS, "one more"])},
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_makes_it_score_again(cache, tokenizer, change):
    model = make_model()
    first = score_queries(make_dataset(), model, tokenizer)
    options = {"dataset": make_dataset(), "tokenizer": tokenizer} | CHANGES[change](model, tokenizer)
    with fed_rows(model) as fed:
        again = score_queries(model=model, **options)
    assert len(fed) == (1 if change == "rows" else len(set(QUESTIONS)))
    assert again[0]["ref_query_id"] != first[0]["ref_query_id"]
    with fed_rows(model) as fed:
        score_queries(model=model, **options)
    assert not fed


def test_what_makes_it_score_again_from_a_folder(cache, tokenizer, tmp_path, loaded_forwards):
    folder = save(tmp_path / "model", make_model(), tokenizer)

    def scores_again(**options):
        loaded_forwards.clear()
        scored = score_queries(make_dataset(), folder, **options)
        return bool(loaded_forwards), ScoreIdentity.parse(scored[0]["ref_query_id"])

    assert scores_again()[0] and not scores_again()[0]
    again, identity = scores_again(dtype="bfloat16")
    assert again and identity.dtype == "bfloat16"
    assert scores_again(dtype=torch.bfloat16) == (False, identity)
    assert scores_again(model_init_kwargs={"rms_norm_eps": 1e-2})[0]
    save(tmp_path / "model", make_model(seed=1), tokenizer)
    assert scores_again()[0] and not scores_again()[0]


def test_a_dataset_in_whatever_form(cache, tokenizer, tmp_path):
    plain = make_dataset(answer=list(range(6)))
    plain.to_parquet(tmp_path / "plain.parquet")
    on_disk = load_dataset("parquet", data_files=str(tmp_path / "plain.parquet"), cache_dir=str(tmp_path))["train"]
    more = make_dataset(["zzz", *QUESTIONS, "zzz"], answer=[-1, *range(6), -1])
    forms = {
        "in memory": (plain, range(6)),
        "with a cache file": (on_disk, range(6)),
        "slice": (more.select(range(1, 7)), range(6)),
        "selected": (more.select([6, 5, 4, 3, 2, 1]), range(5, -1, -1)),
        "shuffled": (plain.shuffle(seed=3), None),
        "formatted": (plain.with_format("torch"), range(6)),
        "formatted in part": (plain.with_format("numpy", columns=["answer"]), range(6)),
    }
    assert on_disk.cache_files and not plain.cache_files
    model = make_model()
    want = score_queries(plain, model, tokenizer)
    with counted_forwards(model) as calls:
        for form, (dataset, order) in forms.items():
            scored = score_queries(dataset, model, tokenizer)
            assert scored.format["type"] == dataset.format["type"], form
            assert set(scored.format["columns"]) == {*dataset.format["columns"], *SCORE_COLUMNS}
            assert scored.split == dataset.split
            rows = scored.with_format(None)
            order = rows["answer"][:] if order is None else list(order)
            assert rows["answer"][:] == order and rows["prompt"][:] == [plain[i]["prompt"] for i in order], form
            for column in SCORE_COLUMNS[:3]:
                assert rows[column][:] == [want[i][column] for i in order], form
        assert not calls
    assert scored._fingerprint == score_queries(dataset, model, tokenizer)._fingerprint
    assert len(dataset.column_names) == 2  # the argument is left alone


def test_scored_again_replaces_the_columns(cache, tokenizer):
    model, dataset = make_model(), make_dataset()
    want = score_queries(dataset, model, tokenizer)
    other = score_queries(dataset, make_model(seed=1), tokenizer, temperature=0.7)
    assert scores_of(other) != scores_of(want)
    for old in (other, other.remove_columns(["query_weight", "ref_query_id"])):
        again = score_queries(old, model, tokenizer)
        assert again.column_names == want.column_names and scores_of(again) == scores_of(want)


# Interruption


KILLED = """
    import os, signal, sys
    sys.path.insert(0, {tests!r})
    from test_scoring import make_dataset, make_model, make_tokenizer, score_queries
    model, calls = make_model(), []
    def hook(*_):
        calls.append(1)
        if len(calls) == {n_calls}:
            os.kill(os.getpid(), signal.SIGKILL)
    model.model.layers[1].register_forward_hook(hook)
    score_queries(make_dataset(), model, make_tokenizer(), batch_tokens=1)
"""


def test_killed_run_goes_on_where_it_stopped(cache, tokenizer):
    script = textwrap.dedent(KILLED).format(tests=os.path.dirname(__file__), n_calls=4)
    killed = subprocess.run([sys.executable, "-c", script], timeout=120, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    model, n_prompts = make_model(), len(set(QUESTIONS))
    with fed_rows(model) as fed:
        resumed = score_queries(make_dataset(), model, tokenizer, batch_tokens=1)
    assert len(fed) == n_prompts - 3
    assert scores_of(resumed) == scores_of(fresh_scores(cache, model, tokenizer))


def fresh_scores(cache, model, tokenizer):
    return score_queries(make_dataset(), model, tokenizer, batch_tokens=1, cache_dir=cache / "fresh")


def garble(data):
    return data[: len(data) // 2] + bytes(b ^ 255 for b in data[len(data) // 2 :])


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-30], lambda data: b"", lambda data: b"no such thing", garble, lambda data: data[100:]],
    ids=["truncated", "empty", "garbage", "second half flipped", "head missing"],
)
def test_a_damaged_file_is_scored_again_with_a_warning(cache, tokenizer, damage, caplog):
    model = make_model()
    want = score_queries(make_dataset(), model, tokenizer)
    (part,) = cache.glob("*/*.npz")
    part.write_bytes(damage(part.read_bytes()))
    with fed_rows(model) as fed, caplog.at_level("WARNING"), propagating_logs():
        again = score_queries(make_dataset(), model, tokenizer)
    assert str(part) in caplog.text and len(fed) == len(set(QUESTIONS))
    assert scores_of(again) == scores_of(want)
    assert len(list(cache.glob("*/*.npz"))) == 1 and not part.exists()


def test_a_half_written_file_is_not_read(cache, tokenizer):
    model = make_model()
    want = score_queries(make_dataset(), model, tokenizer)
    (part,) = cache.glob("*/*.npz")
    part.rename(part.parent / "tmpabc.tmp").write_bytes(b"PK\x03\x04 half")
    with fed_rows(model) as fed:
        again = score_queries(make_dataset(), model, tokenizer)
    assert len(fed) == len(set(QUESTIONS)) and scores_of(again) == scores_of(want)


# Dicts and streams


def test_dataset_dict_takes_span_and_mean_from_train(cache, tokenizer):
    model = make_model()
    test = make_dataset(["12 plus 3", "12 plus 4"])  # alone, its span would be one token
    scored = score_queries(DatasetDict(test=test, train=make_dataset()), model, tokenizer)
    assert list(scored) == ["test", "train"]
    assert len(set(scored["test"]["ref_query_id"]) | set(scored["train"]["ref_query_id"])) == 1
    nll = -np.array(scored["train"]["ref_query_logp"][:], dtype=np.float64)
    mean = nll.mean()
    for row, ids in zip(scored["test"], token_ids(tokenizer, test["prompt"]), strict=True):
        want = naive_logps(model, ids, N_BEFORE, N_AFTER)
        assert row["ref_query_logps"] == approx(want)
        assert row["query_weight"] == approx(min(max(mean / -sum(want), 0.5), 2.0))
    alone = score_queries(make_dataset(), model, tokenizer)
    assert scores_of(scored["train"]) == scores_of(alone)


@pytest.mark.parametrize("options", [{}, {"mean_nll": 20.0}, {"query_scope": "prompt"}, {"span": (8, 13)}])
def test_dataset_dict_without_train(cache, tokenizer, options):
    with pytest.raises(ValueError, match="the splits 'test', 'dev' and no 'train'"):
        score_queries(DatasetDict(test=make_dataset(), dev=make_dataset()), make_model(), tokenizer, **options)


def test_dataset_dict_without_train_that_is_told_everything(cache, tokenizer):
    model = make_model()
    want = score_queries(make_dataset(), model, tokenizer, mean_nll=20.0)
    told = score_queries(DatasetDict(dev=make_dataset()), model, tokenizer, mean_nll=20.0, span=(N_BEFORE, N_AFTER))
    assert scores_of(told["dev"]) == scores_of(want)


def test_a_stream_is_scored_as_a_dataset_is(cache, tokenizer, tmp_path):
    model, dataset = make_model(), make_dataset(answer=list(range(6)))
    want = score_queries(dataset, model, tokenizer)
    identity = ScoreIdentity.parse(want[0]["ref_query_id"])
    told = {"span": (identity.start, identity.end), "mean_nll": identity.mean_nll, "cache_dir": tmp_path / "stream"}
    stream = score_queries(dataset.to_iterable_dataset(num_shards=2), model, tokenizer, **told)
    rows = list(stream)
    for row, expected in zip(rows, want, strict=True):
        assert row["ref_query_logps"] == approx(expected["ref_query_logps"])
        assert row["query_weight"] == approx(expected["query_weight"])
        assert {k: row[k] for k in ("prompt", "answer", "ref_query_id")} == {
            k: expected[k] for k in ("prompt", "answer", "ref_query_id")
        }
    splits = IterableDatasetDict(train=dataset.to_iterable_dataset())
    assert list(score_queries(splits, model, tokenizer, **told)["train"]) == rows
    assert list(score_queries(stream, model, tokenizer, **told)) == rows  # scored already: replaced


def test_a_stream_is_scored_by_the_model_that_was_given(cache, tokenizer):
    """It is read while training changes the module."""
    model = make_model()
    told = {"span": (N_BEFORE, N_AFTER), "mean_nll": 20.0}
    want = score_queries(make_dataset(), model, tokenizer, **told, cache_dir=cache / "before")
    stream = score_queries(make_dataset().to_iterable_dataset(), model, tokenizer, **told)
    torch.nn.init.zeros_(model.lm_head.weight)
    state = torch.get_rng_state()
    assert [row["ref_query_logps"] for row in stream] == want["ref_query_logps"][:]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("options", [{}, {"mean_nll": 20.0}, {"span": (8, 13)}, {"query_scope": "prompt"}])
def test_a_stream_must_be_told_span_and_mean(cache, tokenizer, options):
    with pytest.raises(ValueError, match="train dataset is iterable.*span=.*mean_nll="):
        score_queries(make_dataset().to_iterable_dataset(), make_model(), tokenizer, **options)


def test_scores_survive_parquet_and_are_accepted_by_the_trainer(cache, tokenizer, tmp_path):
    scored = score_queries(make_dataset(), make_model(), tokenizer)
    scored.to_parquet(tmp_path / "scored.parquet")
    loaded = load_dataset("parquet", data_files=str(tmp_path / "scored.parquet"), cache_dir=str(tmp_path))["train"]
    assert loaded.features == scored.features and scores_of(loaded) == scores_of(scored)
    model = make_model()
    with counted_forwards(model) as calls:
        trainer = make_trainer(tmp_path, loaded, tokenizer, model, logging_steps=1)
        assert not calls
    trainer.train()
    assert trainer.state.log_history[0]["query_kl"] < 1e-6  # at the first step, policy and reference are one


# Errors


def conversation_with(*parts):
    return [{"role": "user", "content": list(parts)}]


TEXT, IMAGE = {"type": "text", "text": "hi"}, {"type": "image", "text": None}
BAD_ROWS = {
    "none": (["ab", None], "Row 1 of the train dataset: `prompt` must be a string or a list of messages, got None"),
    "empty": (["ab", "cd", ""], "Row 2 of the train dataset: `prompt` is empty"),
    "no turns": ([user("ab"), []], "Row 1 of the train dataset: `prompt` is empty"),
    "empty turns": ([user("ab"), user("")], "Row 1 of the train dataset: `prompt` is empty"),
    "one token": (["ab", "c"], "Row 1 of the train dataset: its prompt is 1 token long, and the first token is never"),
    "too long": (["x" * 512, "x" * 513], "Row 1 of the train dataset: its prompt is 513 tokens long.*has 512 posi"),
    "image": ([conversation_with(TEXT), conversation_with(TEXT, IMAGE)], r"Row 1 .*not text \(\['text', 'image'\]\)"),
    "numbers": ([3, 4], "Row 0 of the train dataset: `prompt` must be a string or a list of messages, got 3"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named(cache, tokenizer, case):
    prompts, message = BAD_ROWS[case]
    model = make_model()
    with counted_forwards(model) as calls, pytest.raises(ValueError, match=message):
        score_queries(Dataset.from_dict({"prompt": prompts}), model, tokenizer)
    assert not calls
    with pytest.raises(ValueError, match=message):
        list(
            score_queries(
                Dataset.from_dict({"prompt": prompts}).to_iterable_dataset(),
                model,
                tokenizer,
                span=(1, 0),
                mean_nll=1.0,
            )
        )


def test_a_bad_row_far_down_is_named_by_its_own_number(cache, tokenizer):
    dataset = Dataset.from_dict({"prompt": ["ab"] * 1500 + ["c"]})
    with pytest.raises(ValueError, match="Row 1500 of the train"):
        score_queries(dataset, make_model(), tokenizer)
    with pytest.raises(ValueError, match="Row 1500 of the train"):
        list(score_queries(dataset.to_iterable_dataset(), make_model(), tokenizer, span=(1, 0), mean_nll=1.0))
    with pytest.raises(ValueError, match="Row 1 of the dev"):
        score_queries(DatasetDict(train=dataset.select([0]), dev=dataset.select([1, 1500])), make_model(), tokenizer)


def test_strings_and_conversations_mixed(cache, tokenizer):
    from datasets import IterableDataset

    def rows():
        yield {"prompt": "ab"}
        yield {"prompt": user("ab")}

    stream = score_queries(IterableDataset.from_generator(rows), make_model(), tokenizer, span=(1, 0), mean_nll=1.0)
    with pytest.raises(ValueError, match="Row 1 of the train dataset: `prompt` is a list, and a str in the rows bef"):
        list(stream)


def test_a_row_with_nothing_but_the_template_of_the_training_set(cache, tokenizer):
    splits = DatasetDict(train=make_dataset(), test=Dataset.from_dict({"prompt": ["short", "not the template"]}))
    splits["test"] = Dataset.from_dict({"prompt": [user("fine"), [{"role": "u", "content": "x"}]]})
    with pytest.raises(ValueError, match="Row 1 of the test dataset: its prompt is .* nothing is left"):
        score_queries(splits, make_model(), tokenizer, span=(N_BEFORE, N_AFTER + 1))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_log_prob_is_named(cache, tokenizer, value):
    model, dataset = make_model(), make_dataset(["abc", "xyz", "wq", "wq"])
    token = tokenizer("q")["input_ids"][0]
    model.model.embed_tokens.weight.data[token] = value  # 0 × nan: the masked positions before it have it too
    with pytest.raises(ValueError, match=r"Row 2 of the train dataset: log-prob nan at scored token 0 of 21"):
        score_queries(dataset, model, tokenizer, query_scope="prompt")
    model.lm_head.weight.data[:] = value
    with pytest.raises(ValueError, match=r"Row \d of the train dataset: log-prob nan at scored token 0 of"):
        score_queries(dataset, model, tokenizer)
    assert all(np.isfinite(np.load(part)["logps"]).all() for part in cache.glob("*/*.npz"))


def test_columns_that_are_missing_or_of_images(cache, tokenizer):
    with pytest.raises(ValueError, match="train dataset has no `prompt` column, only 'question'.*rename_column"):
        score_queries(Dataset.from_dict({"question": ["ab", "cd"]}), make_model(), tokenizer)
    with pytest.raises(ValueError, match="train dataset has a column 'images'"):
        score_queries(make_dataset(images=[None] * 6), make_model(), tokenizer)
    with pytest.raises(ValueError, match="train dataset has no rows"):
        score_queries(make_dataset().select([]), make_model(), tokenizer)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"query_scope": "question"}, "`query_scope` must be 'query' or 'prompt', got 'question'"),
        ({"weight_min": 3.0}, "weight_min=3.0, weight_max=2.0"),
        ({"temperature": 0.0}, "`temperature` must be above 0, got 0.0"),
        ({"dtype": "bf16"}, "`dtype` must be a torch dtype .* got 'bf16'"),
        ({"dtype": "bfloat16"}, "this module computes in float32"),
        ({"tokenizer": None}, "pass the trainer's as `tokenizer`"),
    ],
)
def test_bad_options(cache, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        score_queries(make_dataset(), make_model(), **{"tokenizer": tokenizer} | options)


def test_identity_is_readable_and_an_unknown_one_is_refused(cache, tokenizer):
    scored = score_queries(make_dataset(), make_model(), tokenizer, temperature=0.5)
    fields = json.loads(scored[0]["ref_query_id"])
    assert fields["temperature"] == 0.5 and fields["dtype"] == "float32" and len(scored[0]["ref_query_id"]) < 350
    assert str(ScoreIdentity.parse(scored[0]["ref_query_id"])) == scored[0]["ref_query_id"]
    for text in ("v0", "{}", '{"model": 1, "other": 2}', None):
        with pytest.raises(ValueError, match="Score the dataset again"):
            ScoreIdentity.parse(text)


def test_a_model_by_its_hub_id(hub_cache, cache):
    """The identity has the Hub id and the commit, and the scores are the folder's."""
    from helpers import COMMIT

    from erpo_trl.tiny import MODEL_PATH

    dataset = Dataset.from_dict({"prompt": ["What is 1 + 1?", "Compute 2 + 3."]})
    by_name = score_queries(dataset, "org/base")
    assert json.loads(by_name[0]["ref_query_id"])["model"] == f"org/base@{COMMIT}"
    by_folder = score_queries(dataset, MODEL_PATH)
    assert by_name["ref_query_logps"][:] == by_folder["ref_query_logps"][:]


def test_the_vllm_backend_is_asked_for_by_name(cache):
    dataset = Dataset.from_dict({"prompt": ["What is 1 + 1?", "Compute 2 + 3."]})
    with pytest.raises(ValueError, match="`backend` must be 'transformers' or 'vllm', got 'sglang'"):
        score_queries(dataset, make_model(), make_tokenizer(), backend="sglang")
    with pytest.raises(ValueError, match="`backend='vllm'` loads the model itself"):
        score_queries(dataset, make_model(), make_tokenizer(), backend="vllm")
