"""From questions to graded samples: in memory, and on disk with interruptions."""

import json
import os

import pyarrow.parquet as pq
import pytest
import torch

from erpo_trl.evaluation import evaluate_model, runner, storage
from erpo_trl.evaluation.benchmarks import Benchmark
from erpo_trl.evaluation.sampling import Completion


UNK, EOS, END, A, B, C, D, THINK, THOUGHT, BOX4, BOX5 = range(11)  # the vocabulary of the bigram model
ROWS = [{"question": "2 + 2", "answer": "4"}, {"question": "2 + 3", "answer": "5"}]


def thinker(make_bigram, four):
    """Thinks for one token, then answers 4 with this probability, else 5."""
    answers = {token: p for token, p in ((BOX4, four), (BOX5, 1 - four)) if p}
    return make_bigram({UNK: {THINK: 1.0}, THINK: {A: 1.0}, A: {THOUGHT: 1.0}, THOUGHT: answers, BOX4: {END: 1.0}})


def test_evaluate_model_accuracy_follows_the_temperature(make_bigram, tokenizer):
    results = evaluate_model(thinker(make_bigram, 0.7), tokenizer, ROWS, (0, 0.5, 1.5), k=400, max_new_tokens=8)
    greedy, *sampled = results
    assert greedy["temperature"] == 0 and greedy["k"] == 1
    assert greedy["avg@k"] == greedy["pass@k"] == greedy["pass@1"] == 0.5  # always 4
    for result in sampled:
        assert result["k"] == 400 and result["questions"] == 2 and result["format"] == 1.0
        assert result["tokens"] == 5 and result["samples_truncated"] == 0  # <think> a </think> \boxed{4} <end>
        p = 0.7 ** (1 / result["temperature"])
        p /= p + 0.3 ** (1 / result["temperature"])
        assert result["avg@k"] == pytest.approx(0.5, abs=0.1)  # one question's p is the other's 1 - p
        low, high = result["avg@k_interval"]
        assert low == pytest.approx(1 - p, abs=0.1) and high == pytest.approx(p, abs=0.1)
        assert result["pass@k"] == 1.0 and result["majority@k"] == 0.5


@pytest.mark.parametrize("four, accuracy", [(1.0, 1.0), (0.0, 0.0)])
def test_all_right_and_all_wrong_with_k_1(make_bigram, tokenizer, four, accuracy):
    rows = [ROWS[0], ROWS[0]]  # a repeated question is two questions
    (result,) = evaluate_model(thinker(make_bigram, four), tokenizer, rows, [1.0], k=1, max_new_tokens=8)
    assert result["questions"] == 2
    for metric in ("avg@k", "pass@k", "pass@1", "majority@k"):
        assert result[metric] == accuracy and result[f"{metric}_interval"] == [accuracy, accuracy]


def test_truncated_are_counted(make_bigram, tokenizer):
    (result,) = evaluate_model(thinker(make_bigram, 1.0), tokenizer, ROWS, [1.0], k=3, max_new_tokens=2)
    assert result["samples_truncated"] == 6 and result["truncated"] == 1.0
    assert result["avg@k"] == 0.0 and result["format"] == 0.0 and result["tokens"] == 2


def test_evaluation_does_not_disturb_training(make_bigram, tokenizer):
    model = thinker(make_bigram, 0.5).train()
    state = torch.get_rng_state()
    evaluate_model(model, tokenizer, ROWS, [1.0], k=2, max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), state) and model.training


class Scripted:
    """A sampler that answers 4 to everything, and dies before the cell number `dies_at`."""

    def __init__(self, dies_at=None):
        self.calls, self.dies_at = [], dies_at

    def sample(self, prompts, *, n, temperature, seed, max_new_tokens):
        if len(self.calls) == self.dies_at:
            raise KeyboardInterrupt
        self.calls.append((len(prompts), n, temperature, seed, max_new_tokens))
        for i in reversed(range(len(prompts))):
            yield i, [Completion("<think> </think> \\boxed{4}", [A] * 3, truncated=j == 1) for j in range(n)]


BENCHMARKS = [Benchmark("one", ROWS, without_gold=1), Benchmark("two", ROWS[:1] * 3, repeated=2)]


def run(sampler, tokenizer, folder, **options):
    options = {"temperatures": [0, 1.0], "k": 2, "settings": {"model": "m"}, "max_new_tokens": 9} | options
    runner.run_evaluation(lambda: sampler, tokenizer, BENCHMARKS, output_dir=folder, **options)


def test_samples_on_disk(tokenizer, tmp_path, capsys):
    sampler = Scripted()
    run(sampler, tokenizer, tmp_path, seed=3)
    assert sampler.calls == [(2, 1, 0, 3, 9), (2, 2, 1.0, 3, 9), (3, 1, 0, 3, 9), (3, 2, 1.0, 3, 9)]
    path = storage.cell_path(tmp_path, "one", 1.0)
    assert path.name == "one_T1.parquet"
    rows = pq.read_table(path).to_pylist()
    assert [(r["question"], r["sample"], r["correct"], r["truncated"]) for r in rows] == [
        (0, 0, 1.0, False),
        (0, 1, 1.0, True),
        (1, 0, 0.0, False),
        (1, 1, 0.0, True),
    ]
    assert rows[3]["question_text"] == "2 + 3" and rows[3]["gold"] == "5" and rows[3]["answer"] == "4"
    settings = storage.read_settings(path)
    assert settings["model"] == "m" and settings["k"] == 2 and settings["without_gold"] == 1
    assert "one_T1: 2 of 4 completions cut off at 9 tokens" in capsys.readouterr().out


def test_an_interrupted_run_goes_on(tokenizer, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Scripted(dies_at=2), tokenizer, tmp_path)
    assert len(list(tmp_path.glob("samples/*"))) == 2
    (tmp_path / "samples" / "two_T0.tmp").write_bytes(b"half a fi")  # as a kill while writing leaves it
    sampler = Scripted()
    run(sampler, tokenizer, tmp_path)
    assert [call[:3] for call in sampler.calls] == [(3, 1, 0), (3, 2, 1.0)]

    def no_sampler():
        raise AssertionError("a finished run loads no model")

    runner.run_evaluation(no_sampler, tokenizer, BENCHMARKS, [0, 1.0], 2, tmp_path, {"model": "m"}, max_new_tokens=9)


def test_a_damaged_file_is_made_again(tokenizer, tmp_path, capsys):
    run(Scripted(), tokenizer, tmp_path)
    path = storage.cell_path(tmp_path, "two", 0)
    whole = path.read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"not parquet"):
        path.write_bytes(damage)
        sampler = Scripted()
        run(sampler, tokenizer, tmp_path)
        assert len(sampler.calls) == 1 and "not a whole result file" in capsys.readouterr().out
        assert storage.read_cell(path)


def test_nothing_half_written(tokenizer, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run(Scripted(), tokenizer, tmp_path)
    assert [path.suffix for path in tmp_path.glob("samples/*")] == [".tmp"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": 3}, "k: 2 there, 3 now"),
        ({"seed": 1}, "seed: 0 there, 1 now"),
        ({"settings": {"model": "other"}}, "model: 'm' there, 'other' now"),
        ({"max_new_tokens": 10}, "max_new_tokens: 9 there, 10 now"),
    ],
)
def test_other_settings_are_refused_unless_overwritten(tokenizer, tmp_path, change, message):
    run(Scripted(), tokenizer, tmp_path)
    with pytest.raises(ValueError, match=message + ".*--overwrite"):
        run(Scripted(), tokenizer, tmp_path, **change)
    sampler = Scripted()
    run(sampler, tokenizer, tmp_path, overwrite=True, **change)
    assert len(sampler.calls) == 4


def test_another_prompt_is_another_run(tokenizer, tmp_path):
    run(Scripted(), tokenizer, tmp_path)
    tokenizer.chat_template = "{% for m in messages %}c {{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="prompts: "):
        run(Scripted(), tokenizer, tmp_path)


def test_model_identity(tmp_path):
    assert storage.model_identity("org/model-on-the-hub") is None
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    before = storage.model_identity(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"a": 12}))
    assert storage.model_identity(str(tmp_path)) != before
