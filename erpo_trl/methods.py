"""
The policy-gradient methods of the paper (Tables 2 and 6, Appendix E and G): one table, name to the options it sets.

A method's options are defaults: a YAML file wins over them and the command line over both. From Python,
`ERPOConfig(**apply_method("dapo_erpo", {"output_dir": "out"}))`; in a script, on a `TrlParser` before it parses,

    method = get_method(method_name(sys.argv[1:]))
    parser = TrlParser((ScriptArguments, CONFIGS[method.trainer], ModelConfig))
    parser.set_defaults_with_config(**method.options)

Written out are all options that define the estimator, also where TRL 1.16 has the same default.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True)
class Method:
    """
    One row of the table.

    Args:
        options (`dict`):
            Fields of the trainer family's config and their values.
        trainer (`str`):
            The family: `"grpo"` (`ERPOConfig`, `ERPOTrainer`) or `"rloo"` (`ERPORLOOConfig`, `ERPORLOOTrainer`).
        soft_overlong_punishment (`bool`):
            Whether `trl.rewards.get_soft_overlong_punishment` is added to the rewards (DAPO, Eq. 13).
        on_policy (`bool`):
            Whether the estimator holds only when every update samples its own rollout ([`check_on_policy`]).
    """

    options: dict[str, Any]
    trainer: str = "grpo"
    soft_overlong_punishment: bool = False
    on_policy: bool = False


# What regularizes the policy.
UNREGULARIZED = {"beta": 0.0, "query_kl_coef": 0.0, "use_query_weight": False}
POLICY_KL = UNREGULARIZED | {"beta": 0.01}
QUERY_KL = UNREGULARIZED | {"query_kl_coef": 0.01}
ERPO = QUERY_KL | {"use_query_weight": True}

# What all estimators on GRPOTrainer share. The paper's framework adds the plain K3 to the loss and does not reweight
# by the sampler's own log-probs; TRL's defaults do both (a ratio on the K3, a truncated ratio under vLLM).
TOKEN_RATIO = {
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
    "vllm_importance_sampling_correction": False,
    "mask_truncated_completions": False,
    "num_iterations": 1,
}
# Section 5.1 and the framework's defaults: token-level loss (TRL's "dapo": the sum over an update's tokens, divided by
# the rollout's mean number of tokens per update), clip 0.2 / 0.3.
# Its framework also bounds the ratio by 3 where A < 0 (dual clip), which the paper does not mention: --delta 3.
GRPO = TOKEN_RATIO | {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.3}
# Clip-higher, token-level loss. Overlong completions are punished (the flag), not masked. TRL 1.16 has no dynamic
# sampling. The substitute: a group whose rewards are all equal has advantage zero, so it adds nothing to the
# policy gradient; it is not sampled again, and its tokens still count in the loss's divisor, so the step shrinks by
# their share (logged as `frac_reward_zero_std`).
DAPO = TOKEN_RATIO | {"loss_type": "dapo", "scale_rewards": "group", "epsilon": 0.2, "epsilon_high": 0.28}
# No length and no difficulty bias: divided by the constant rows x max_completion_length, advantages not scaled.
DR_GRPO = TOKEN_RATIO | {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon": 0.2, "epsilon_high": None}
# min(r A, clip(r, 1 ± ε) A) per token, each rollout used num_iterations times. Without a critic, the advantage is the
# reward less its group's mean, divided by the standard deviation over the rollout. `epsilon_high=None`: same as ε.
# Two iterations: as many updates (`max_steps`) come from half the rollouts.
PPO = TOKEN_RATIO | {
    "loss_type": "dapo",
    "scale_rewards": "batch",
    "epsilon": 0.2,
    "epsilon_high": None,
    "num_iterations": 2,
}
# u = 1 and A = g - b (Appendix G), b the group's mean: 1/(B L_max) Σ_i A_i ∇log π(o_i|q_i), with L_max the constant
# max_completion_length. u = 1 because every update has its own rollout: the ratio is then one, and no clip binds.
# With G completions, g - mean(g) is (G - 1)/G of the leave-one-out advantage, which is the unbiased one.
REINFORCE = TOKEN_RATIO | {"loss_type": "dr_grpo", "scale_rewards": "none"}
# Sequence-level ratio and clip, leave-one-out baseline; β enters the reward as a k1 penalty (TRL's RLOOTrainer).
RLOO = {
    "normalize_advantages": False,
    "mask_truncated_completions": False,
    "num_iterations": 1,
    "epsilon": 0.2,
    "epsilon_high": 0.3,
}

METHODS = {
    "grpo": Method(GRPO | POLICY_KL),
    # The weight beside the Policy-KL: with neither KL the paper's runs did not converge (footnote 2).
    "grpo_qw": Method(GRPO | POLICY_KL | {"use_query_weight": True}),
    "grpo_qkl": Method(GRPO | QUERY_KL),
    "erpo": Method(GRPO | ERPO),
    "dapo": Method(DAPO | UNREGULARIZED, soft_overlong_punishment=True),
    "dapo_erpo": Method(DAPO | ERPO, soft_overlong_punishment=True),
    "dr_grpo": Method(DR_GRPO | UNREGULARIZED),
    "dr_grpo_erpo": Method(DR_GRPO | ERPO),
    "rloo": Method(RLOO | POLICY_KL, trainer="rloo"),
    "rloo_erpo": Method(RLOO | ERPO, trainer="rloo"),
    "ppo_erpo": Method(PPO | ERPO),
    "reinforce": Method(REINFORCE | UNREGULARIZED, on_policy=True),
    "reinforce_erpo": Method(REINFORCE | ERPO, on_policy=True),
}


def get_method(name: str) -> Method:
    """The table's row of that name; `ValueError` with the names there are for any other."""
    if name not in METHODS:
        raise ValueError(f"Unknown method {name!r}. Type --method <one of: {', '.join(METHODS)}>.")
    return METHODS[name]


def apply_method(name: str, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """
    The method's options with the explicitly given ones over them.

    Args:
        name (`str`):
            A key of `METHODS`.
        explicit (`Mapping`):
            What was given, and only that: a value that equals the config's default still wins over the method's.

    Returns:
        `dict`: the effective options: the method's and the given ones.

    Raises:
        ValueError: no such method.
    """
    return get_method(name).options | dict(explicit)


def method_name(args: Sequence[str], default: str = "erpo") -> str:
    """
    The method that a command line asks for: its `--method`, else `method:` in the file of its `--config`, else
    `default`. Needed before the full parse, whose config class it decides.

    Raises:
        FileNotFoundError: there is no such config file.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--method")
    parser.add_argument("--config")
    given, _ = parser.parse_known_args(args)
    if given.method is not None or given.config is None:
        return given.method or default
    if not Path(given.config).is_file():
        raise FileNotFoundError(f"No config file {given.config!r}. Type --config <an existing .yaml file>.")
    return (yaml.safe_load(Path(given.config).read_text()) or {}).get("method", default)


def check_on_policy(name: str, args: Any) -> None:
    """
    Refuse a REINFORCE run whose later updates would use stale rollouts: TRL then multiplies by a ratio that is not 1.

    Args:
        name (`str`):
            A key of `METHODS`.
        args (`trl.GRPOConfig`):
            The config of the run; read are `steps_per_generation`, `num_iterations`, `gradient_accumulation_steps`.

    Raises:
        ValueError: the method is on-policy and a rollout would serve more than one update.
    """
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if get_method(name).on_policy and updates > 1:
        raise ValueError(
            f"`{name}` needs a new rollout for every update, but a rollout would serve {updates:g} updates "
            f"(steps_per_generation {args.steps_per_generation} x num_iterations {args.num_iterations}, "
            f"gradient_accumulation_steps {args.gradient_accumulation_steps}). Type "
            f"--steps_per_generation {args.gradient_accumulation_steps} --num_iterations 1: the same updates, sampled "
            "in smaller rollouts."
        )
