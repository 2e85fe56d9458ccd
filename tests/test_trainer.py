"""ERPOTrainer against the base trainer, against a naive implementation of the formulas, and against misuse."""

import copy
import json
import math

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from helpers import make_model, make_tokenizer
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from erpo_trl import ERPOConfig, ERPORLOOConfig, ERPORLOOTrainer, ERPOTrainer, score_queries
from erpo_trl.scoring import SCORE_COLUMNS


QUESTIONS = ["What is 1+1?", "Compute 22*3.", "hi", "What is 1+1?", "Solve x+4=9 now", "7-5", "Is 91 prime?", "2^10"]
OFF = {"query_kl_coef": 0.0, "use_query_weight": False}


def make_dataset(questions=QUESTIONS, **columns):
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions], **columns})


def reward(completions, **kwargs):
    """Any deterministic function of the completion."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(ord, text)) % 7) for text in texts]


class Recorder(TrainerCallback):
    """Keeps the weights before each optimizer step, and the gradient that it takes."""

    def __init__(self):
        self.weights, self.grads = [], []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.grads.append({n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None})


def make_trainer(tmp_path, cls=ERPOTrainer, model="qwen2", dataset=None, tokenizer=None, recorder=None, **options):
    config = {
        ERPOTrainer: ERPOConfig,
        GRPOTrainer: GRPOConfig,
        ERPORLOOTrainer: ERPORLOOConfig,
        RLOOTrainer: RLOOConfig,
    }[cls]
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 6,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
    }
    eval_dataset = options.pop("eval_dataset", None)
    args = config(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        **defaults | options,
    )
    return cls(
        make_model(model) if model in ("llama", "qwen2", "gpt2") else model,
        reward,
        args,
        dataset if dataset is not None else make_dataset(),
        eval_dataset,
        processing_class=tokenizer or make_tokenizer(),
        callbacks=[recorder] if recorder else None,
    )


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def trained(tmp_path, cls, **options):
    trainer = make_trainer(tmp_path, cls, **options)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    return after


# Off = base

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
SCHEDULES = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "generation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "iterations": {"num_iterations": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "policy_kl": {"beta": 0.04},
}


def test_every_loss_type_is_here():
    import inspect
    import re

    source = inspect.getsource(GRPOTrainer._compute_loss)
    named = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"self\.loss_type (?:==|in) (\[.*?\]|\".*?\")", source))))
    assert named == set(LOSS_TYPES)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_off_is_the_base_trainer_bit_for_bit(tmp_path, cache, loss_type, schedule):
    options = {"loss_type": loss_type, **SCHEDULES[schedule]}
    if schedule == "policy_kl":  # the reference model is loaded from the policy's folder
        make_model("qwen2").save_pretrained(tmp_path / "model")
        options["model"] = str(tmp_path / "model")
    base = trained(tmp_path, GRPOTrainer, **options)
    assert_equal(base, trained(tmp_path, ERPOTrainer, **OFF, **options))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_off_is_the_base_trainer_on_other_models(tmp_path, cache, kind):
    base = trained(tmp_path, GRPOTrainer, model=kind)
    assert_equal(base, trained(tmp_path, ERPOTrainer, model=kind, **OFF))


@pytest.mark.parametrize("schedule", ["plain", "accumulation", "iterations"])
def test_off_is_the_base_trainer_for_rloo(tmp_path, cache, schedule):
    options = {"beta": 0.0, **SCHEDULES[schedule]}
    base = trained(tmp_path, RLOOTrainer, **options)
    assert_equal(base, trained(tmp_path, ERPORLOOTrainer, **OFF, **options))


def test_the_monitor_alone_changes_no_parameter(tmp_path, cache):
    base = trained(tmp_path, GRPOTrainer)
    trainer = make_trainer(tmp_path, **OFF, log_query_kl=True)
    trainer.train()
    assert_equal(base, parameters(trainer))
    logged = [entry["query_kl"] for entry in trainer.state.log_history if "query_kl" in entry]
    assert len(logged) == 4 and logged[0] < 1e-9 and logged[-1] > 1e-5


def test_off_scores_nothing(tmp_path, cache):
    trainer = make_trainer(tmp_path, **OFF)
    assert not set(SCORE_COLUMNS) & set(trainer.train_dataset.column_names) and not cache.exists()


# On = the formula


def naive_gradient(weights, initial, micro_batches, tokenizer, options, kind="qwen2", rloo=False, questions=QUESTIONS):
    """
    The gradient of one optimizer step, from the formulas: float64, row by row, no padding, own softmax.

    L = -(1/B) Σ_i w_i A_i (1/|o_i|) Σ_t log π(o_it) + α (1/B) Σ_i k(q_i): on policy, a clipped ratio's gradient.
    """
    temperature, alpha = options.get("temperature", 1.0), options.get("query_kl_coef", 1e-2)
    policy, reference = make_model(kind).double(), make_model(kind).double()
    policy.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    reference.load_state_dict({k: v.double() for k, v in initial.items()}, strict=False)

    def log_probs(model, ids):  # (T-1,)
        logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
        return torch.log_softmax(logits, dim=-1)[range(len(ids) - 1), ids[1:]]

    rows = []
    for batch in micro_batches:
        for row in range(batch["prompt_ids"].size(0)):
            rows.append(
                [
                    batch[f"{part}_ids"][row][batch[f"{part}_mask"][row].bool()].tolist()
                    for part in ("prompt", "completion")
                ]
            )
    prompts = [
        tokenizer.apply_chat_template(p, add_generation_prompt=True)["input_ids"]
        for p in make_dataset(questions)["prompt"]
    ]
    start, end = 1, 0
    if options.get("query_scope", "query") == "query":
        shortest = min(map(len, prompts))
        start = next(i for i in range(shortest) if len({p[i] for p in prompts}) > 1)
        end = next(i for i in range(shortest) if len({p[-1 - i] for p in prompts}) > 1)
    with torch.no_grad():
        nll = {tuple(p): -log_probs(reference, p)[start - 1 : len(p) - end - 1].sum().item() for p in prompts}
    mean_nll = sum(nll[tuple(p)] for p in prompts) / len(prompts)

    rewards = reward(tokenizer.batch_decode([o for _, o in rows], skip_special_tokens=True))
    loss = 0.0
    for prompt, completion in rows:
        group = [r for r, (p, _) in zip(rewards, rows, strict=True) if p == prompt]
        own = reward(tokenizer.batch_decode([completion], skip_special_tokens=True))[0]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        leave_one_out = (sum(group) - own) / (len(group) - 1)
        advantage = own - leave_one_out if rloo else (own - mean) / (std + 1e-4)
        weight = 1.0
        if options.get("use_query_weight", True):
            weight = min(max(mean_nll / nll[tuple(prompt)], 0.5), 2.0)
        logps = log_probs(policy, prompt + completion)
        completion_logps = logps[len(prompt) - 1 :]
        loss = loss - weight * advantage * (completion_logps.sum() if rloo else completion_logps.mean()) / len(rows)
        with torch.no_grad():
            ref = log_probs(reference, prompt)[start - 1 : len(prompt) - end - 1]
        delta = ref - logps[start - 1 : len(prompt) - end - 1]
        level = options.get("query_kl_level", "token")
        delta = {"token": delta, "sequence": delta.sum()[None], "sequence_mean": delta.mean()[None]}[level]
        k = delta**2 / 2 if options.get("query_kl_estimator", "k3") == "k2" else torch.exp(delta) - delta - 1
        loss = loss + alpha * k.mean() / len(rows)
    loss.backward()
    return {name: p.grad for name, p in policy.named_parameters()}


def assert_step_is_the_formula(tmp_path, cls=ERPOTrainer, kind="qwen2", questions=QUESTIONS, **options):
    recorder = Recorder()
    tokenizer = make_tokenizer()
    options = {"loss_type": "grpo", "max_grad_norm": 0.0, "max_steps": 2, "learning_rate": 3e-3} | options
    if cls is ERPORLOOTrainer:
        options = {k: v for k, v in options.items() if k != "loss_type"} | {"beta": 0.0}
    dataset = make_dataset(questions)
    trainer = make_trainer(
        tmp_path, cls, model=kind, dataset=dataset, tokenizer=tokenizer, recorder=recorder, **options
    )
    trainer.train()
    is_rloo = cls is ERPORLOOTrainer
    want = naive_gradient(
        *recorder.weights[1::-1], trainer._buffered_inputs, tokenizer, options, kind, is_rloo, questions
    )
    # What the step took, against the formula; the regularizer's part of it must be visible at this tolerance
    for name, grad in recorder.grads[1].items():
        torch.testing.assert_close(
            grad.double(), want[name], rtol=2e-3, atol=2e-5 * max(1, want[name].abs().max().item())
        )
    return trainer, recorder


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("use_query_weight", [True, False])
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_mean"])
@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_a_whole_step_is_the_formula(tmp_path, cache, estimator, level, use_query_weight, temperature):
    assert_step_is_the_formula(
        tmp_path,
        query_kl_estimator=estimator,
        query_kl_level=level,
        use_query_weight=use_query_weight,
        temperature=temperature,
        query_kl_coef=1.0 if level == "token" else 0.1,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_whole_step_is_the_formula_with_the_whole_prompt_and_accumulation(tmp_path, cache, kind):
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4}
    assert_step_is_the_formula(tmp_path, kind=kind, query_scope="prompt", query_kl_coef=1.0, **options)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_whole_step_is_the_formula_for_rloo(tmp_path, cache, accumulation):
    options = {"per_device_train_batch_size": 8 // accumulation, "gradient_accumulation_steps": accumulation}
    assert_step_is_the_formula(tmp_path, ERPORLOOTrainer, query_kl_coef=1.0, num_generations=4, **options)


def test_gpt2_trains_on_prompts_of_one_length_and_is_refused_on_padded_ones(tmp_path, cache):
    same = ["1+1=", "2+3=", "4*2=", "9-7="]
    trainer, _ = assert_step_is_the_formula(tmp_path, kind="gpt2", questions=same, query_kl_coef=1.0)
    assert trainer.state.log_history[0]["query_kl"] < 1e-9
    with pytest.raises(ValueError, match="GPT2LMHeadModel looks positions up by column"):
        make_trainer(tmp_path, model="gpt2").train()


# No extra forward


class ForwardSpy:
    """Counts the policy's forwards, and keeps labels and prompts of those of the loss."""

    def __init__(self, model):
        self.calls, self.labels, self.input_ids = 0, [], []
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module, args, kwargs):
        self.calls += 1
        if kwargs.get("fused_lm_head"):
            self.labels.append(kwargs["labels"].clone())
            self.input_ids.append(kwargs["input_ids"].clone())


@pytest.mark.parametrize("cls, base", [(ERPOTrainer, GRPOTrainer), (ERPORLOOTrainer, RLOOTrainer)])
def test_no_extra_forward(tmp_path, cache, cls, base):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4, "beta": 0.0}
    options["learning_rate"] = 0.0  # the same rollouts, so that generation's forwards can be counted with the rest
    counts = []
    for trainer_class in (cls, base):
        trainer = make_trainer(tmp_path, trainer_class, **options)
        spy = ForwardSpy(trainer.model)
        trainer.train()
        counts.append((spy.calls, len(spy.labels)))
    assert counts[0] == counts[1] and counts[0][0] > counts[0][1] >= 8


def test_one_row_per_distinct_prompt_is_unmasked(tmp_path, cache):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    trainer = make_trainer(tmp_path, **options)
    spy = ForwardSpy(trainer.model)
    inputs = []
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda model, batch, **kw: (inputs.append(batch), compute_loss(model, batch, **kw))[1]
    trainer.train()
    mixed = 0
    for batch, labels, input_ids in zip(inputs, spy.labels, spy.input_ids, strict=True):
        n_prompt = batch["prompt_ids"].size(1)
        prompts = [tuple(row) for row in batch["prompt_ids"].tolist()]
        seen = set()
        for row, prompt in enumerate(prompts):
            expected = torch.full((n_prompt,), -100)
            if prompt not in seen:  # only the first row of a prompt, only the query's tokens
                expected = torch.where(batch["query_mask"][row], input_ids[row, :n_prompt], -100)
                assert (expected != -100).any()
            seen.add(prompt)
            assert torch.equal(labels[row, :n_prompt], expected)
        mixed += len(seen) > 1
    assert mixed  # the shuffle did mix prompts within a micro-batch


# Decoupling, scaling, padding


def one_batch(trainer, distance=0.05):
    """A generated and scored batch, and the trainer in training mode with a policy away from its reference."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    rows = [trainer.train_dataset[i] for i in (0, 0, 1, 1)]
    batch = trainer._generate_and_score_completions(rows)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(distance * torch.randn_like(p))
    trainer.state.global_step = 1
    return batch


def gradient(trainer, batch):
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def test_the_query_kl_gradient_does_not_see_the_completion(tmp_path, cache):
    trainer = make_trainer(tmp_path, query_kl_coef=1.0)
    batch = one_batch(trainer)
    batch["advantages"].zero_()  # what is left is the regularizer
    loss, grad = gradient(trainer, batch)
    other = batch | {"completion_ids": (batch["completion_ids"] + 100) % 259}
    assert not (other["completion_ids"] == batch["completion_ids"]).any()
    other_loss, other_grad = gradient(trainer, other)
    assert loss > 1e-3 and grad.norm() > 1e-2
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(other_grad, grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows, steps", [(4, 2), (2, 4)])
def test_accumulated_rows_give_the_gradient_of_one_batch(tmp_path, cache, rows, steps):
    grads = []
    for n_rows, n_steps in [(8, 1), (rows, steps)]:
        recorder = Recorder()
        trainer = make_trainer(
            tmp_path,
            recorder=recorder,
            per_device_train_batch_size=n_rows,
            gradient_accumulation_steps=n_steps,
            num_generations=2,
            loss_type="grpo",
            max_steps=2,
            query_kl_coef=1.0,
            learning_rate=1e-3,
        )
        trainer.train()
        grads.append((recorder.grads[1], [e for e in trainer.state.log_history if "query_kl" in e][1]))
    for name, grad in grads[0][0].items():
        torch.testing.assert_close(grads[1][0][name], grad, rtol=1e-3, atol=1e-5)
    for key in ("query_kl", "query_nll", "query_weight/mean", "query_weight/min", "query_weight/max"):
        assert grads[1][1][key] == pytest.approx(grads[0][1][key], rel=1e-4)


def test_evaluation_is_not_divided_and_logs_its_own_numbers(tmp_path, cache):
    losses = []
    for steps in (1, 4):
        trainer = make_trainer(
            tmp_path,
            eval_dataset=make_dataset(),
            gradient_accumulation_steps=steps,
            loss_type="grpo",
            query_kl_coef=2.0,
        )
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1.2)
        torch.manual_seed(0)
        metrics = trainer.evaluate()
        logged = trainer.state.log_history[-1]
        # on policy, the mean of group-normalized advantages is 0: the loss is the regularizer
        assert metrics["eval_loss"] == pytest.approx(logged["eval_query_kl_loss"], abs=1e-4)
        assert (
            logged["eval_query_kl_loss"] == pytest.approx(2 * logged["eval_query_kl"], rel=1e-6)
            and logged["eval_query_kl"] > 0.01
        )
        losses.append(metrics["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_window_that_the_epoch_cuts_short_is_divided_by_what_is_in_it(tmp_path, cache):
    trainer = make_trainer(tmp_path, query_kl_coef=1.0, gradient_accumulation_steps=4, loss_type="grpo")
    batch = one_batch(trainer)
    batch["advantages"].zero_()  # what is left is the regularizer
    whole = gradient(trainer, batch)[0]
    trainer.current_gradient_accumulation_steps = 3  # what the HF Trainer sets there
    assert gradient(trainer, batch)[0].item() == pytest.approx(whole.item() * 4 / 3, rel=1e-6) and whole > 1e-3


def test_a_pad_token_at_the_start_makes_another_prompt(tmp_path, cache):
    dataset = Dataset.from_dict({"prompt": ["<pad>ab", "ab", "<pad>ac", "ac"]})
    trainer = make_trainer(tmp_path, dataset=dataset, query_scope="prompt", query_kl_coef=1.0)
    batch = one_batch(trainer)
    assert torch.equal(batch["prompt_ids"][0], batch["prompt_ids"][2])
    assert len(set(batch["query_index"].tolist())) == 2
    gradient(trainer, batch)
    both = trainer._query_sums["train"]["kl"]
    one_row = [{k: v[i : i + 1] if v.dim() else v for k, v in batch.items()} for i in range(4)]
    trainer._query_sums["train"].clear()
    for row in one_row:
        gradient(trainer, row)
    assert both == pytest.approx(trainer._query_sums["train"]["kl"], rel=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_pad_columns_change_nothing(tmp_path, cache, kind):
    trainer = make_trainer(tmp_path, model=kind, query_kl_coef=0.1)
    batch = one_batch(trainer, distance=0.02)
    loss, grad = gradient(trainer, batch)
    padded = dict(batch)
    for key in ("prompt_ids", "prompt_mask", "ref_query_logps", "query_mask"):
        padded[key] = torch.cat([batch[key].new_zeros(4, 7), batch[key]], dim=1)
    padded_loss, padded_grad = gradient(trainer, padded)
    assert padded_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    assert grad.abs().max() > 1e-2 and (padded_grad - grad).abs().max() < 1e-6


def test_both_regularizers_add_up(tmp_path, cache):
    """beta > 0 beside the Query-KL: the loss is GRPO's, Policy-KL and all, plus α times the logged Query-KL."""
    make_model("qwen2").save_pretrained(tmp_path / "model")
    common = {"model": str(tmp_path / "model"), "beta": 0.5, "use_query_weight": False, "loss_type": "grpo"}
    both = make_trainer(tmp_path, query_kl_coef=1.0, **common)
    batch = one_batch(both)
    loss, grad = gradient(both, batch)
    both.args.query_kl_coef = 0.0
    base_loss, base_grad = gradient(both, batch)
    kl = both._query_sums["train"]["kl"] / both._query_sums["train"]["rows"]
    assert kl > 1e-3 and both._metrics["train"]["kl"][0] > 1e-3
    assert loss.item() - base_loss.item() == pytest.approx(kl, rel=1e-4)
    assert (grad - base_grad).norm() > 1e-3


def test_policy_kl_run_with_a_free_query_kl_monitor(tmp_path, cache):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    options = {"model": str(tmp_path / "model"), "beta": 0.04}
    base = trained(tmp_path, GRPOTrainer, **options)
    trainer = make_trainer(tmp_path, **options, **OFF)
    trainer.train()
    assert_equal(base, parameters(trainer))
    assert all("query_kl" in entry for entry in trainer.state.log_history[:4])
    assert all("query_weight/mean" not in entry for entry in trainer.state.log_history)


# Logs


def test_logged_numbers_are_the_formulas(tmp_path, cache):
    recorder = Recorder()
    trainer = make_trainer(
        tmp_path,
        recorder=recorder,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=2,
        query_kl_coef=0.3,
        learning_rate=3e-3,
    )
    trainer.train()
    logged = trainer.state.log_history[1]
    policy = make_model("qwen2").double()
    policy.load_state_dict({k: v.double() for k, v in recorder.weights[1].items()}, strict=False)
    kl, nll, tokens, weights = [], 0.0, 0, []
    for batch in trainer._buffered_inputs:
        for row in range(2):
            ids = batch["prompt_ids"][row][batch["prompt_mask"][row].bool()]
            mask = batch["query_mask"][row][batch["prompt_mask"][row].bool()]
            ref = batch["ref_query_logps"][row][batch["query_mask"][row]].double()
            with torch.no_grad():
                logps = torch.log_softmax(policy(ids[None]).logits[0], -1)[range(len(ids) - 1), ids[1:]][mask[1:]]
            delta = ref - logps
            kl.append((delta.exp() - delta - 1).mean().item())
            nll, tokens = nll - logps.sum().item(), tokens + len(logps)
            weights.append(batch["query_weight"][row].item())
    assert logged["query_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-3)
    assert logged["query_kl_loss"] == pytest.approx(0.3 * logged["query_kl"], rel=1e-9)
    assert logged["query_nll"] == pytest.approx(nll / tokens, rel=1e-5)
    assert logged["query_weight/mean"] == pytest.approx(sum(weights) / len(weights), rel=1e-6)
    assert (logged["query_weight/min"], logged["query_weight/max"]) == (min(weights), max(weights))


def test_means_over_several_steps_are_of_all_their_rows(tmp_path, cache):
    single = make_trainer(tmp_path, max_steps=5)
    single.train()
    joint = make_trainer(tmp_path, max_steps=5, logging_steps=5)
    joint.train()
    steps, logged = single.state.log_history[:5], joint.state.log_history[0]
    assert logged["query_kl"] == pytest.approx(sum(entry["query_kl"] for entry in steps) / 5, rel=1e-6)
    for extreme, name in [(min, "query_weight/min"), (max, "query_weight/max")]:
        values = [entry[name] for entry in steps]
        assert logged[name] == extreme(values) and len(set(values)) > 2


def test_policy_kl_is_measured_every_k_steps_and_changes_nothing(tmp_path, cache):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    recorder = Recorder()
    trainer = make_trainer(tmp_path, model=str(tmp_path / "model"), policy_kl_steps=2, recorder=recorder)
    trainer.train()
    assert trainer.beta == trainer.args.beta == 0.0
    plain = make_trainer(tmp_path, model=str(tmp_path / "model"))
    plain.train()
    assert_equal(parameters(plain), parameters(trainer))
    logged = ["policy_kl" in entry for entry in trainer.state.log_history[:4]]
    assert logged == [True, False, True, False]
    assert trainer.state.log_history[0]["policy_kl"] < 1e-9 < 1e-5 < trainer.state.log_history[2]["policy_kl"]


def test_policy_kl_is_the_one_that_beta_logs(tmp_path, cache):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    common = {"model": str(tmp_path / "model"), "max_steps": 2, **OFF}
    measured = make_trainer(tmp_path, policy_kl_steps=1, **common)
    measured.train()
    logged = make_trainer(tmp_path, beta=1e-12, **common)
    logged.train()
    want = logged.state.log_history[1]["kl"]
    assert want > 1e-5 and measured.state.log_history[1]["policy_kl"] == pytest.approx(want, rel=1e-3)


def test_policy_kl_leaves_out_what_a_tool_wrote(tmp_path, cache):
    trainer = make_trainer(tmp_path)
    inputs = {"completion_mask": torch.tensor([[1, 1, 0]]), "tool_mask": torch.tensor([[1, 0, 1]])}
    trainer._log_policy_kl(inputs | {"initial_per_token_logps": torch.zeros(1, 3)}, torch.tensor([[-1.0, -5.0, -9.0]]))
    sums = trainer._query_sums["train"]
    assert sums["policy_kl"] / sums["policy_tokens"] == pytest.approx(math.e - 2)


# Guards


def scored(dataset=None, model=None, tokenizer=None, **options):
    return score_queries(
        dataset or make_dataset(), model or make_model("qwen2"), tokenizer or make_tokenizer(), **options
    )


def test_a_scored_set_is_taken_as_it_is(tmp_path, cache):
    dataset = scored()
    forwards = []
    model = make_model("qwen2")
    model.register_forward_pre_hook(lambda *_: forwards.append(1))
    trainer = make_trainer(tmp_path, model=model, dataset=dataset)
    assert not forwards and trainer.train_dataset is dataset
    trainer.train()
    automatic = make_trainer(tmp_path)
    automatic.train()
    assert_equal(parameters(trainer), parameters(automatic))


@pytest.mark.parametrize("remove_unused_columns", [True, False])
def test_remove_unused_columns(tmp_path, cache, remove_unused_columns):
    trainer = make_trainer(
        tmp_path, dataset=make_dataset(extra=list(range(8))), remove_unused_columns=remove_unused_columns
    )
    trainer.train()
    assert trainer.state.log_history[-2]["query_kl"] > 0


def test_reward_functions_see_the_columns_of_the_dataset_only(tmp_path, cache):
    seen = []
    trainer = make_trainer(tmp_path, dataset=make_dataset(answer=list("abcdefgh")), remove_unused_columns=False)
    trainer.reward_funcs = [lambda completions, **kwargs: (seen.append(kwargs), reward(completions))[1]]
    trainer.train()
    assert "answer" in seen[0] and not set(SCORE_COLUMNS) & set(seen[0])


def test_another_template(tmp_path, cache):
    other = make_tokenizer(chat_template=make_tokenizer().chat_template.replace("assistant: ", "assistant says: "))
    with pytest.raises(ValueError, match=r"Row 0: 32 tokens when scored, 37 here"):
        make_trainer(tmp_path, dataset=scored(), tokenizer=other)


def test_another_template_of_the_same_length(tmp_path, cache):
    other = make_tokenizer(chat_template=make_tokenizer().chat_template.replace("assistant: ", "assistant> "))
    with pytest.raises(ValueError, match="as many tokens here as when scored, but not the same"):
        make_trainer(tmp_path, dataset=scored(), tokenizer=other)


def test_a_prompt_that_is_not_trained_on_as_it_was_scored(tmp_path, cache):
    trainer = make_trainer(tmp_path)
    tokenize = trainer._tokenize_prompts
    trainer._tokenize_prompts = lambda prompts: ([ids[2:] for ids in tokenize(prompts)[0]], *tokenize(prompts)[1:])
    with pytest.raises(
        ValueError, match=r"Row \d of the training set, .* had (\d+) tokens when it was scored, and has \d+"
    ):
        trainer.train()


def test_a_rollout_function_that_rewrites_a_prompt(tmp_path, cache):
    def rollout(prompts, trainer):
        ids = trainer._tokenize_prompts(prompts)[0]
        return {
            "prompt_ids": [[*p[:-1], 7] for p in ids],
            "completion_ids": [[10, 2] for _ in ids],
            "logprobs": [[-1.0, -1.0] for _ in ids],
        }

    trainer = make_trainer(tmp_path)
    trainer.rollout_func = rollout
    with pytest.raises(
        ValueError, match=r"was rewritten between the dataset \(\d+ tokens\) and the model \(\d+ tokens\)"
    ):
        trainer.train()


@pytest.mark.parametrize(
    "how, options, message",
    [
        ({"temperature": 0.7}, {}, "temperature = 0.7, and this trainer has 1.0.*set `temperature`"),
        ({}, {"temperature": 0.7}, "temperature = 1.0, and this trainer has 0.7"),
        ({"query_scope": "prompt"}, {}, "scope = 'prompt', and this trainer has 'query'.*`query_scope`"),
        ({}, {"query_scope": "prompt"}, "scope = 'query', and this trainer has 'prompt'"),
        ({"weight_max": 3.0}, {}, "weight_max = 3.0, and this trainer has 2.0.*`query_weight_max`"),
        ({}, {"query_weight_min": 0.4}, "weight_min = 0.5, and this trainer has 0.4.*`query_weight_min`"),
        (
            {"normalize_weight": True},
            {},
            "weights are normalized, and this trainer has `query_weight_normalize=False`",
        ),
        ({}, {"query_weight_normalize": True}, "weights are not normalized"),
    ],
)
def test_scored_for_another_setup(tmp_path, cache, how, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, dataset=scored(**how), **options)


@pytest.mark.parametrize("span, found", [((6, 13), "start = 6, .* has 7"), ((7, 12), "end = 12, .* has 13")])
def test_an_eval_set_scored_with_another_span(tmp_path, cache, span, found):
    with pytest.raises(ValueError, match=f"The eval dataset was scored with {found}"):
        make_trainer(tmp_path, dataset=scored(span=(7, 13)), eval_dataset=scored(span=span))


@pytest.mark.parametrize("named", ["train", "eval"])
def test_an_eval_set_may_name_the_reference_otherwise(tmp_path, cache, named):
    """One set scored from the folder by the user, the other by the trainer from the module that it loaded."""
    make_model("qwen2").save_pretrained(tmp_path / "model")
    train, evals = make_dataset(), make_dataset(["3*3", "the area of a circle"])
    by_name = scored(train, str(tmp_path / "model"))
    identity = json.loads(by_name[0]["ref_query_id"])
    if named == "train":
        train = by_name
    else:
        span = (identity["start"], identity["end"])
        evals = scored(evals, str(tmp_path / "model"), span=span, mean_nll=identity["mean_nll"])
    trainer = make_trainer(tmp_path, model=str(tmp_path / "model"), dataset=train, eval_dataset=evals)
    assert trainer.train_dataset[0]["ref_query_id"] != trainer.eval_dataset[0]["ref_query_id"]
    trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_query_kl"] < 1e-9


def test_a_late_eval_set_scored_with_another_span(tmp_path, cache):
    trainer = make_trainer(tmp_path)
    with pytest.raises(ValueError, match="was scored in another way than the rest"):
        trainer.evaluate(scored(span=(6, 13)))


def test_rows_of_mixed_identity(tmp_path, cache):
    mixed = concatenate_datasets([scored(), scored(weight_max=1.5)])
    with pytest.raises(ValueError, match="scored in 2 different ways: row 0 has .*row 8 has"):
        make_trainer(tmp_path, dataset=mixed)


def test_a_row_of_another_identity_in_a_stream(tmp_path, cache):
    from datasets import interleave_datasets

    parts = [scored().to_iterable_dataset(), scored(weight_max=1.5).to_iterable_dataset()]
    trainer = make_trainer(tmp_path, dataset=interleave_datasets(parts), shuffle_dataset=False)
    with pytest.raises(ValueError, match="was scored in another way than the rest"):
        trainer.train()


def test_missing_score_columns(tmp_path, cache):
    with pytest.raises(ValueError, match="has the score columns .* but not query_weight"):
        make_trainer(tmp_path, dataset=scored().remove_columns("query_weight"))


def test_an_unscored_eval_set_given_late(tmp_path, cache):
    trainer = make_trainer(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="has no `ref_query_logps`.*score_queries"):
        trainer.evaluate(make_dataset())


def test_eval_sets_are_scored_with_the_span_and_mean_of_the_training_set(tmp_path, cache):
    evals = {"a": make_dataset(["3*3", "the area of a circle"]), "b": make_dataset(["8/2"])}
    trainer = make_trainer(tmp_path, eval_dataset=evals)
    ids = {trainer.train_dataset[0]["ref_query_id"], *(d[0]["ref_query_id"] for d in trainer.eval_dataset.values())}
    assert len(ids) == 1
    assert trainer.evaluate()["eval_a_loss"] is not None


def test_another_models_scores(tmp_path, cache):
    dataset = scored(model=make_model("qwen2", seed=1))
    with pytest.raises(ValueError, match="nats per token away .*the scores are another model's"):
        make_trainer(tmp_path, dataset=dataset).train()


def test_dropout_of_the_attention_function_has_its_own_message(tmp_path, cache):
    model = make_model("qwen2", attention_dropout=0.5)
    trainer = make_trainer(tmp_path, model=model, disable_dropout=True)  # which only reaches dropout modules
    with pytest.raises(ValueError, match=r"dropout is active \(.*attention_dropout\).*with `attention_dropout=0.0`"):
        trainer.train()


def test_a_dropout_module_has_its_own_message(tmp_path, cache):
    model, dataset = make_model("gpt2"), make_dataset(["1+1=", "2+3="])
    model.transformer.drop.p = model.config.embd_pdrop = 0.5
    model.train()
    trainer = make_trainer(tmp_path, model=model, dataset=dataset)
    want = scored(dataset, model=model, cache_dir=tmp_path / "other")  # without dropout
    assert trainer.train_dataset["ref_query_logp"][:] == pytest.approx(want["ref_query_logp"][:], rel=1e-5)
    with pytest.raises(ValueError, match=r"dropout is active \(transformer.drop\).*`disable_dropout=True`"):
        trainer.train()
    make_trainer(tmp_path, model=model, dataset=dataset, disable_dropout=True, max_steps=1).train()
    other = scored(dataset, model=make_model("gpt2", seed=1))
    with pytest.raises(ValueError, match="the scores are another model's"):
        make_trainer(tmp_path, model=model, dataset=other, disable_dropout=True).train()


def test_training_again_goes_on_with_the_same_reference(tmp_path, cache):
    make_model("qwen2").save_pretrained(tmp_path / "model")
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "policy_kl_steps": 2}
    trainer = make_trainer(tmp_path, model=str(tmp_path / "model"), **options)
    trainer.train()
    trainer.train()
    logged = trainer.state.log_history[:3]
    assert logged[0]["query_kl"] > 1e-5  # not a fresh run: the reference is still the initial policy
    assert ["policy_kl" in entry for entry in logged] == [True, False, True] and logged[0]["policy_kl"] > 1e-5


def test_several_environments_are_refused(tmp_path, cache):
    trainer = make_trainer(tmp_path)
    trainer._multi_environment = True
    with pytest.raises(ValueError, match="Pass one environment, or set `query_kl_coef=0, use_query_weight=False`"):
        trainer._prepare_scores()


def test_a_stream_needs_scores_and_trains_with_them(tmp_path, cache):
    with pytest.raises(ValueError, match="IterableDataset.*score_queries"):
        make_trainer(tmp_path, dataset=make_dataset().to_iterable_dataset())
    by_row = scored()
    identity = json.loads(by_row[0]["ref_query_id"])
    stream = scored(
        make_dataset().to_iterable_dataset(), span=(identity["start"], identity["end"]), mean_nll=identity["mean_nll"]
    )
    assert list(stream)[0]["ref_query_logps"] == by_row[0]["ref_query_logps"]
    trainer = make_trainer(tmp_path, dataset=stream, max_steps=2)
    trainer.train()
    assert trainer.state.log_history[0]["query_kl"] < 1e-9


def test_a_plain_config_is_refused(tmp_path):
    args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match="must be an `ERPOConfig`, got a `GRPOConfig`"):
        ERPOTrainer(make_model("qwen2"), reward, args, make_dataset(), processing_class=make_tokenizer())


def test_config_defaults_and_errors(tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    config = ERPOConfig(**common)
    assert (config.query_kl_coef, config.query_kl_estimator, config.query_kl_level) == (1e-2, "k3", "token")
    assert (config.query_scope, config.use_query_weight, config.beta) == ("query", True, 0.0)
    assert (config.query_weight_min, config.query_weight_max, config.query_weight_normalize) == (0.5, 2.0, False)
    for options, message in [
        ({"query_kl_estimator": "k1"}, "`query_kl_estimator` must be one of 'k2', 'k3', got 'k1'"),
        ({"query_kl_level": "word"}, "`query_kl_level` must be one of"),
        ({"query_scope": "all"}, "`query_scope` must be one of 'query', 'prompt'"),
        ({"query_kl_coef": -1.0}, "`query_kl_coef` must be at least 0"),
        ({"query_weight_min": 3.0}, r"got \[3.0, 2.0\]"),
        ({"query_weight_min": 0.0}, r"got \[0.0, 2.0\]"),
        ({"policy_kl_steps": -1}, "`policy_kl_steps` must be at least 0"),
        ({"query_score_batch_tokens": 0}, "`query_score_batch_tokens` must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ERPOConfig(**common, **options)


def test_policy_kl_steps_beside_beta(tmp_path, cache):
    with pytest.raises(ValueError, match="`policy_kl_steps=2` is for runs without a Policy-KL"):
        make_trainer(tmp_path, policy_kl_steps=2, beta=0.1)


def test_policy_kl_steps_beside_a_moving_reference(tmp_path, cache):
    with pytest.raises(ValueError, match="KL to the initial model.*Set `sync_ref_model=False`"):
        make_trainer(tmp_path, policy_kl_steps=2, sync_ref_model=True)


def test_model_card(tmp_path, cache):
    trainer = make_trainer(tmp_path, query_kl_coef=0.05, query_kl_level="sequence_mean", query_weight_max=3.0)
    trainer.create_model_card(model_name="my-model")
    card = (tmp_path / "out" / "README.md").read_text()
    for words in ("trained with ERPO", "papers/2608.23311", "α | 0.05", "k3, sequence_mean", "Query scope | query"):
        assert words in card
    assert "clipped to [0.5, 3.0]" in card and "- erpo" in card and "arXiv:2608.23311" in card


# Adapters


def test_lora(tmp_path, cache):
    """The reference is the model as training starts, and Query-KL is 0 there and moves after."""
    from peft import LoraConfig

    args = ERPOConfig(
        output_dir=str(tmp_path),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=6,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-1,
        save_strategy="no",
        policy_kl_steps=1,
    )
    trainer = ERPOTrainer(
        make_model("qwen2"),
        reward,
        args,
        make_dataset(),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    kl = [entry["query_kl"] for entry in trainer.state.log_history if "query_kl" in entry]
    assert kl[0] < 1e-9 and kl[-1] > 1e-6
    assert trainer.ref_model is None and trainer.state.log_history[-2]["policy_kl"] > 1e-6


def test_an_adapter_that_is_there_already(tmp_path, cache):
    """The reference is the model with the adapter as it is when training starts, and not the base model."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model = get_peft_model(make_model("qwen2"), config)
    trainer = make_trainer(tmp_path, model=model, max_steps=3, learning_rate=1e-1, policy_kl_steps=1)
    base = scored()["ref_query_logp"][:]
    assert abs(base[0] - trainer.train_dataset[0]["ref_query_logp"]) > 1e-2
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "query_kl" in entry]
    assert log[0]["query_kl"] < 1e-9 and log[-1]["query_kl"] > 1e-6
    assert log[0]["policy_kl"] < 1e-9 and log[-1]["policy_kl"] > 1e-6


def test_prompt_tuning(tmp_path, cache):
    """Virtual tokens are in front of the prompt's columns."""
    from peft import PromptTuningConfig, get_peft_model

    model = get_peft_model(make_model("qwen2"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    trainer = make_trainer(tmp_path, model=model, max_steps=3, learning_rate=1e-1)
    trainer.train()
    kl = [entry["query_kl"] for entry in trainer.state.log_history if "query_kl" in entry]
    assert kl[0] < 1e-9 and kl[-1] > 1e-3


def test_the_random_states_and_modules_are_left_alone(tmp_path, cache):
    model = make_model("qwen2")
    model.train()
    before = copy.deepcopy(dict(model.state_dict()))
    state = torch.get_rng_state()
    scored(model=model)
    assert torch.equal(torch.get_rng_state(), state) and model.training and "forward" not in model.__dict__
    assert_equal(before, model.state_dict())


# Another trainer of TRL's


def test_the_mixin_on_another_trainer_in_a_few_lines(tmp_path, cache):
    from dataclasses import dataclass

    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

    from erpo_trl import QueryRegularizationConfig, QueryRegularizationMixin

    @dataclass
    class ERPOGMPOConfig(QueryRegularizationConfig, GMPOConfig):
        pass

    class ERPOGMPOTrainer(QueryRegularizationMixin, GMPOTrainer):
        _config_class = ERPOGMPOConfig
        _name = "ERPO on GMPO"

    def run(cls, config, **options):
        args = config(
            output_dir=str(tmp_path / "out"),
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=6,
            max_steps=3,
            logging_steps=1,
            learning_rate=1e-2,
            **options,
        )
        trainer = cls(
            make_model("qwen2"), reward, args, train_dataset=make_dataset(), processing_class=make_tokenizer()
        )
        trainer.train()
        return trainer

    base, off = run(GMPOTrainer, GMPOConfig), run(ERPOGMPOTrainer, ERPOGMPOConfig, **OFF)
    assert_equal(parameters(base), parameters(off))
    trainer = run(ERPOGMPOTrainer, ERPOGMPOConfig)
    kl = [entry["query_kl"] for entry in trainer.state.log_history if "query_kl" in entry]
    assert kl[0] < 1e-9 and kl[-1] > 1e-5 and trainer.state.log_history[1]["query_weight/max"] == 2
    batch = one_batch(trainer)
    loss = gradient(trainer, batch)[0]
    mean_kl = trainer._query_sums["train"]["kl"] / trainer._query_sums["train"]["rows"]
    trainer.args.query_kl_coef = 0.0
    assert (loss - gradient(trainer, batch)[0]).item() == pytest.approx(1e-2 * mean_kl, rel=1e-3)


def test_normalized_weights_whose_mean_is_one(tmp_path, cache):
    dataset = scored(make_dataset(["2+2"]), normalize_weight=True)
    assert dataset["query_weight"][:] == [1.0]
    make_trainer(tmp_path, dataset=dataset, query_weight_normalize=True)
