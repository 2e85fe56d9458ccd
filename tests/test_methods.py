"""The table of methods, and by gradient that REINFORCE, PPO and RLOO in it are what their names say."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, TrlParser

from erpo_trl.config import ERPOConfig, ERPORLOOConfig
from erpo_trl.methods import ERPO, METHODS, apply_method, check_on_policy, get_method, method_name


NAMES = [
    *("grpo", "grpo_qw", "grpo_qkl", "erpo", "dapo", "dapo_erpo", "dr_grpo", "dr_grpo_erpo"),
    *("rloo", "rloo_erpo", "ppo_erpo", "reinforce", "reinforce_erpo"),
]


def options_of(name, keys):
    return tuple(METHODS[name].options[key] for key in keys.split())


def test_the_table_s_names_and_families():
    assert list(METHODS) == NAMES
    assert [name for name in NAMES if METHODS[name].trainer == "rloo"] == ["rloo", "rloo_erpo"]
    assert [name for name in NAMES if METHODS[name].soft_overlong_punishment] == ["dapo", "dapo_erpo"]
    for name, method in METHODS.items():
        config = {"grpo": ERPOConfig, "rloo": ERPORLOOConfig}[method.trainer]
        assert method.options.keys() <= {field.name for field in fields(config)}, name


def test_regularizers_are_those_of_the_paper_s_tables():
    rows = {name: options_of(name, "beta query_kl_coef use_query_weight") for name in NAMES}
    assert rows == {
        "grpo": (0.01, 0.0, False),
        "grpo_qw": (0.01, 0.0, True),
        "grpo_qkl": (0.0, 0.01, False),
        "erpo": (0.0, 0.01, True),
        "dapo": (0.0, 0.0, False),
        "dapo_erpo": (0.0, 0.01, True),
        "dr_grpo": (0.0, 0.0, False),
        "dr_grpo_erpo": (0.0, 0.01, True),
        "rloo": (0.01, 0.0, False),
        "rloo_erpo": (0.0, 0.01, True),
        "ppo_erpo": (0.0, 0.01, True),
        "reinforce": (0.0, 0.0, False),
        "reinforce_erpo": (0.0, 0.01, True),
    }


@pytest.mark.parametrize("name", [name for name in NAMES if f"{name}_erpo" in NAMES])
def test_erpo_changes_only_the_regularizer(name):
    changed = METHODS[f"{name}_erpo"].options.items() - METHODS[name].options.items()
    assert {key for key, _ in changed} <= ERPO.keys()


def test_estimators():
    keys = "loss_type scale_rewards num_iterations"
    assert options_of("erpo", f"{keys} epsilon epsilon_high") == ("dapo", "group", 1, 0.2, 0.3)
    assert options_of("dapo_erpo", f"{keys} epsilon epsilon_high") == ("dapo", "group", 1, 0.2, 0.28)
    assert options_of("dr_grpo_erpo", f"{keys} epsilon epsilon_high") == ("dr_grpo", "none", 1, 0.2, None)
    assert options_of("ppo_erpo", f"{keys} epsilon epsilon_high") == ("dapo", "batch", 2, 0.2, None)
    assert options_of("reinforce_erpo", keys) == ("dr_grpo", "none", 1)
    assert options_of("rloo_erpo", "normalize_advantages num_iterations") == (False, 1)


def test_explicit_options_win():
    effective = apply_method("grpo", {"beta": 0.0, "output_dir": "out"})  # 0.0 is also the config's default
    assert effective["beta"] == 0.0 and effective["output_dir"] == "out" and effective["epsilon_high"] == 0.3
    assert METHODS["grpo"].options["beta"] == 0.01


def test_an_unknown_method_lists_those_there_are():
    with pytest.raises(ValueError, match=r"'egpo'.*--method <one of: grpo, grpo_qw, .*reinforce_erpo>"):
        apply_method("egpo", {})


def test_method_name(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("method: dapo\nbeta: 0.5\n")
    assert method_name(["--learning_rate", "1"]) == "erpo"
    assert method_name(["--config", str(config), "--beta", "-1"]) == "dapo"
    assert method_name(["--config", str(config), "--method", "rloo"]) == "rloo"
    assert method_name(["--method=rloo"]) == "rloo"
    with pytest.raises(FileNotFoundError, match="run.yml"):
        method_name(["--config", str(tmp_path / "run.yml")])


def test_parsed_as_a_script_does_command_line_over_yaml_over_method(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"beta: 0.0\nepsilon: 0.1\noutput_dir: {tmp_path}\nuse_cpu: true\n")
    parser = TrlParser(ERPOConfig)
    assert parser.set_defaults_with_config(**get_method("grpo_qw").options) == []
    (args,) = parser.parse_args_and_config(["--config", str(config), "--epsilon", "0.15"])
    effective = apply_method("grpo_qw", {"beta": 0.0, "epsilon": 0.15})
    assert {key: getattr(args, key) for key in effective} == effective
    assert (args.beta, args.epsilon, args.epsilon_high, args.use_query_weight) == (0.0, 0.15, 0.3, True)


def test_reinforce_refuses_stale_rollouts():
    args = SimpleNamespace(steps_per_generation=64, num_iterations=1, gradient_accumulation_steps=16)
    with pytest.raises(ValueError, match="would serve 4 updates .*--steps_per_generation 16 --num_iterations 1"):
        check_on_policy("reinforce", args)
    check_on_policy("erpo", args)
    args.steps_per_generation = 16
    check_on_policy("reinforce", args)


# What runs, by gradient: two updates of TRL's own training loop, each against autograd of the naive estimator at the
# weights the update started from.

PROMPTS, GENERATIONS, LENGTH = 4, 4, 8
ROWS = PROMPTS * GENERATIONS


def tiny_tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def tiny_llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def reward(completion_ids, **kwargs):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


class Recorder(TrainerCallback):
    """The weights before each update and the gradients of it."""

    def __init__(self):
        self.weights, self.gradients = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})


def run(name, tmp_path, learning_rate, trainer_class, config_class):
    """Two updates of a method under TRL's trainer; the rollouts (in the order sampled), weights and gradients."""
    rows = Dataset.from_dict({"prompt": [" ".join(f"w{3 * i + j}" for j in range(2 + i)) for i in range(PROMPTS)]})
    known = {field.name for field in fields(config_class)}
    args = config_class(
        output_dir=str(tmp_path),
        **{key: value for key, value in METHODS[name].options.items() if key in known},
        per_device_train_batch_size=ROWS // 2,
        gradient_accumulation_steps=2,
        num_generations=GENERATIONS,
        max_completion_length=LENGTH,
        max_steps=2,
        learning_rate=learning_rate,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    recorder, rollouts = Recorder(), []
    trainer = trainer_class(
        tiny_llama(), reward, args=args, train_dataset=rows, processing_class=tiny_tokenizer(), callbacks=[recorder]
    )
    generate_and_score = trainer._generate_and_score_completions

    def record(inputs):
        rollouts.append(generate_and_score(inputs))
        return rollouts[-1]

    trainer._generate_and_score_completions = record
    trainer.train()
    return rollouts, recorder


def completion_logps(model, rollout):
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], dim=1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], dim=1)
    start = rollout["prompt_ids"].size(1) - 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, start:-1]
    return logits.log_softmax(-1).gather(-1, rollout["completion_ids"][..., None])[..., 0]  # (B, T)


def grouped_rewards(rollout):
    rows = zip(rollout["completion_ids"], rollout["completion_mask"].bool(), strict=True)
    ids = [ids[mask].tolist() for ids, mask in rows]
    return torch.tensor(reward(ids)).view(PROMPTS, GENERATIONS)


def reinforce_loss(logps, old_logps, mask, rewards):
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    return -(advantages * logps * mask).sum() / (ROWS * LENGTH)


def ppo_loss(logps, old_logps, mask, rewards):
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + 1e-4)).view(-1, 1)
    ratio = (logps - old_logps).exp()
    return -(torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * mask).sum() / mask.sum()


def rloo_loss(logps, old_logps, mask, rewards):
    others = (rewards.sum(1, keepdim=True) - rewards) / (GENERATIONS - 1)
    ratio = ((logps - old_logps) * mask).sum(1).exp()
    return -torch.min(ratio * (rewards - others).view(-1), ratio.clamp(0.8, 1.3) * (rewards - others).view(-1)).mean()


def check_gradients(naive_loss, rollouts, sampled_from, recorder):
    """Each update's gradient against the naive one; returns the token ratios of the last update."""
    model = tiny_llama()
    for rollout, old, weights, gradients in zip(
        rollouts, sampled_from, recorder.weights, recorder.gradients, strict=True
    ):
        mask = rollout["completion_mask"]
        with torch.no_grad():
            model.load_state_dict(old, strict=False)
            old_logps = completion_logps(model, rollout)
        model.load_state_dict(weights, strict=False)
        model.zero_grad()
        logps = completion_logps(model, rollout)
        naive_loss(logps, old_logps, mask, grouped_rewards(rollout)).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
        assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3
    return (logps - old_logps).exp()[mask.bool()].detach()


def test_reinforce_is_reinforce(tmp_path):
    rollouts, recorder = run("reinforce", tmp_path, 1.0, GRPOTrainer, GRPOConfig)
    assert len(rollouts) == 2  # a fresh one for each update
    ratios = check_gradients(reinforce_loss, rollouts, recorder.weights, recorder)
    assert (ratios == 1).all()


def test_ppo_is_ppo(tmp_path):
    rollouts, recorder = run("ppo_erpo", tmp_path, 0.1, GRPOTrainer, GRPOConfig)
    assert len(rollouts) == 1  # used for both updates
    ratios = check_gradients(ppo_loss, rollouts * 2, recorder.weights[:1] * 2, recorder)
    assert 0.05 < ((ratios < 0.8) | (ratios > 1.2)).float().mean() < 0.95  # the clip binds for some


def test_rloo_is_reinforce_with_the_leave_one_out_baseline(tmp_path):
    rollouts, recorder = run("rloo_erpo", tmp_path, 0.1, RLOOTrainer, RLOOConfig)
    assert len(rollouts) == 2
    check_gradients(rloo_loss, rollouts, recorder.weights, recorder)
