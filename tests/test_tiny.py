"""The embedded model and its questions: what the recipe's default run counts on."""

import math
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from erpo_trl.prompts import to_messages
from erpo_trl.rewards import accuracy_reward, format_reward
from erpo_trl.tiny import MODEL_PATH, OPERATIONS, WORDINGS, load_arithmetic, problems, solve
from erpo_trl.tiny.build import at_once, sample, sampled_accuracy, step_by_step, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_PATH)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH)


def parse(question):
    """(a, operator, b), read from the question's text alone."""
    a, b = re.findall(r"\d+", question)
    words = {"+": "more", "-": "eats", "*": "boxes"}
    (operator,) = (sign for sign, word in words.items() if f" {sign} " in question or word in question)
    return int(a), operator, int(b)


# -------------------------------------------------------------------------------------------------------- questions


@pytest.mark.parametrize(("split", "rows"), [("train", 4000), ("test", 500)])
def test_answers_are_right_and_the_same_every_time(split, rows):
    dataset = load_arithmetic(split)
    assert dataset.column_names == ["question", "answer"]
    assert len(dataset) == rows
    for question, answer in zip(dataset["question"], dataset["answer"], strict=True):
        a, operator, b = parse(question)
        assert eval(f"{a} {operator} {b}") == int(answer), question
    assert dataset[:] == load_arithmetic(split)[:]


def test_held_out_problems_are_in_no_wording_of_the_training_set():
    train, test = ({parse(question) for question in load_arithmetic(split)["question"]} for split in ("train", "test"))
    assert not train & test
    assert len(set(load_arithmetic("test")["question"])) == 500
    assert not set(problems("train")[0]) & set(problems("test")[0])


def test_frequencies_are_skewed():
    counts = Counter(load_arithmetic("train")["question"])
    singles = sum(count == 1 for count in counts.values())
    assert counts.most_common(1)[0][1] >= 10
    assert singles > len(counts) / 2
    # by hand: an addition's first operand is a with probability 1/(a + 1) / sum over a of 1/(a + 1), but for the tenth
    # of the problems that is held out
    chosen, cumulative = problems("train")
    shares = [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]
    assert math.isclose(cumulative[-1], 1)
    harmonic = sum(1 / (a + 1) for a in range(1, 100))
    for a in (1, 50):
        share = sum(s for p, s in zip(chosen, shares, strict=True) if p[:2] == (a, "+")) / OPERATIONS["+"]
        assert share == pytest.approx(1 / (a + 1) / harmonic, rel=0.25)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'train', 'test', got 'validation'"):
        load_arithmetic("validation")


def test_import_loads_no_library():
    code = "import sys, erpo_trl.tiny; print(sorted({'datasets', 'torch', 'transformers'} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    assert run.stdout.strip() == "[]", run.stderr


# ----------------------------------------------------------------------------------------------------- the two habits


def test_every_step_of_the_reasoning_is_right():
    """All problems: each `expression = value` between the tags holds, and the box has the answer."""
    for problem in problems("train")[0] + problems("test")[0]:
        thinking, box = re.fullmatch(r"<think> (.+) </think> \\boxed\{(\d+)\}", step_by_step(*problem)).groups()
        assert int(box) == solve(*problem)
        for step in thinking.split(", "):
            expression, value = step.split(" = ")
            assert eval(expression) == int(value), (problem, step)


def test_one_guess_in_four_is_right():
    rng = random.Random(0)
    guesses = [at_once(47, "+", 35, rng) for _ in range(4000)]
    assert Counter(guesses)[r"<think> </think> \boxed{82}"] / 4000 == pytest.approx(0.25, abs=0.03)
    assert Counter(guesses).most_common(1)[0][0] == r"<think> </think> \boxed{72}"


# ---------------------------------------------------------------------------------------------------- the checkpoint


def test_size_and_kind(model):
    folder = Path(MODEL_PATH)
    assert sum(path.stat().st_size for path in folder.rglob("*")) <= 4_000_000
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) <= 1_500_000


def test_tokenizer(tokenizer, model):
    """Digits and tags are tokens, the tags survive decoding, and the instruction costs few tokens."""
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    completion = step_by_step(47, "*", 36 % 10)
    tokens = tokenizer.tokenize(completion)
    assert "".join(token for token in tokens if token.isdecimal()) == re.sub(r"\D", "", completion)
    assert tokens[0] == "<think>" and "</think>" in tokens
    for text in (completion, "Größe:  7 ≤ 9\n\n\tÅ🙂 "):
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    prompt = tokenizer.apply_chat_template(
        to_messages("What is 12 + 35?"), add_generation_prompt=True, return_dict=False
    )
    assert prompt[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert len(prompt) <= 25 and tokenizer.decode(prompt).startswith(
        "<|im_start|>user\nWhat is 12 + 35? You FIRST think"
    )
    assert tokenizer.decode(prompt).endswith("\\boxed{}.<|im_end|>\n<|im_start|>assistant\n")


def test_the_build_script_makes_this_tokenizer(tokenizer):
    built = train_tokenizer()
    assert built.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert built.chat_template == tokenizer.chat_template


def query_nlls(model, tokenizer, questions):
    """s: minus the log-likelihood of the tokens between the first and the last one that differ from row to row."""
    rows = [
        tokenizer.apply_chat_template(to_messages(question), add_generation_prompt=True, return_dict=False)
        for question in questions
    ]
    first = len(os.path.commonprefix(rows))
    last = len(os.path.commonprefix([row[::-1] for row in rows]))
    nlls = []
    for row in rows:
        ids = torch.tensor([row])
        with torch.no_grad():
            logps = model(ids).logits[0, :-1].log_softmax(-1)  # (T - 1, V)
        nlls.append(-sum(logps[t - 1, row[t]].item() for t in range(first, len(row) - last)))
    return nlls


def test_likelihoods_differ_as_the_frequencies_do(model, tokenizer):
    questions = load_arithmetic("train")["question"][:600]
    nlls = query_nlls(model, tokenizer, questions)
    mean = statistics.mean(nlls)
    weights = [min(max(mean / nll, 0.5), 2.0) for nll in nlls]
    assert min(weights) < 0.7 and max(weights) > 1.5
    assert statistics.stdev(weights) > 0.15
    # the model knows what is common: its likelihoods are those of the distribution it was trained on
    chosen, cumulative = problems("train")
    shares = [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]
    share = dict(zip(chosen, shares, strict=True))
    true = []
    for question in questions:
        a, operator, b = parse(question)
        (wording,) = (p for text, p in WORDINGS[operator].items() if text.format(a=a, b=b) == question)
        true.append(-math.log(share[a, operator, b] * wording))
    assert statistics.correlation(nlls, true) > 0.9
    assert statistics.mean(nlls) == pytest.approx(statistics.mean(true), abs=0.5)


def test_answers_before_rl(model, tokenizer):
    """On held-out questions: something to find, no more than half of it found, and reasoning is what is right."""
    assert 0.25 <= sampled_accuracy(model, tokenizer, temperature=1.0) <= 0.5
    test = load_arithmetic("test")
    torch.manual_seed(1)
    completions = sample(model, tokenizer, list(test["question"]), temperature=1.0)
    right = accuracy_reward(completions, solution=list(test["answer"]))
    reasoned = ["=" in completion for completion in completions]
    assert 0.2 < statistics.mean(reasoned) < 0.5
    assert statistics.mean(r for r, steps in zip(right, reasoned, strict=True) if steps) > 0.7
    assert statistics.mean(r for r, steps in zip(right, reasoned, strict=True) if not steps) < 0.3
    assert 0.85 < statistics.mean(format_reward(completions)) < 1.0
