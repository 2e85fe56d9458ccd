"""The options ERPO adds to TRL's."""

from dataclasses import dataclass, field

from trl import GRPOConfig, RLOOConfig


@dataclass
class QueryRegularizationConfig:
    """
    The fields that the query-side regularizer and weight add to a TRL online-RL config (arXiv 2608.23311).

    Args:
        query_kl_coef (`float`, defaults to `1e-2`):
            α, the coefficient of the Query-KL in the loss (Eq. 5, 11). `0` leaves it out of the loss.
        query_kl_estimator (`str`, defaults to `"k3"`):
            `"k3"`: e^Δ - Δ - 1 (the paper's), or `"k2"`: Δ²/2 (the gradient of Proposition 1), Δ = reference - policy.
        query_kl_level (`str`, defaults to `"token"`):
            `"token"`: mean over the scored tokens of k(Δ_t) (this project's choice); `"sequence"`: k of the summed Δ
            (the paper's letter); `"sequence_mean"`: k(ΣΔ / n).
        query_scope (`str`, defaults to `"query"`):
            What is scored. `"query"`: the tokens left when the longest prefix and suffix common to all training
            prompts (the template) are dropped; `"prompt"`: the whole prompt.
        use_query_weight (`bool`, defaults to `True`):
            Whether advantages are multiplied by the static query weight clip(s̄ / s_i) (Eq. 9, Appendix I).
        query_weight_min (`float`, defaults to `0.5`):
            Lower clip of the weight (not printed in the paper; this project's choice).
        query_weight_max (`float`, defaults to `2.0`):
            Upper clip of the weight (likewise).
        query_weight_normalize (`bool`, defaults to `False`):
            Whether the clipped weights are divided by their mean over the training set.
        log_query_kl (`bool`, *optional*):
            Whether to score the prompts and log `query_kl` even when neither the Query-KL nor the weight acts on the
            loss. `None` (default): do so when `beta > 0`, so that a Policy-KL run shows its query drift; with
            `beta = 0` the trainer is then the base trainer, bit for bit.
        policy_kl_steps (`int`, defaults to `0`):
            Log `policy_kl`, the K3 estimate of the Policy-KL to the initial model over the completions, once every
            this many optimizer steps, for runs without `beta`. Costs a reference forward at those steps and a
            reference model in memory (none with PEFT). `0`: never.
        query_score_batch_tokens (`int`, defaults to `4096`):
            Padded tokens per forward when the trainer scores the prompts under the initial policy.
    """

    query_kl_coef: float = field(default=1e-2, metadata={"help": "α, the coefficient of the Query-KL in the loss."})
    query_kl_estimator: str = field(
        default="k3", metadata={"help": "Query-KL estimator: 'k3' or 'k2'.", "choices": ["k2", "k3"]}
    )
    query_kl_level: str = field(
        default="token",
        metadata={
            "help": "Level of the Query-KL: 'token', 'sequence' or 'sequence_mean'.",
            "choices": ["token", "sequence", "sequence_mean"],
        },
    )
    query_scope: str = field(
        default="query",
        metadata={"help": "What is scored: 'query' (template dropped) or 'prompt'.", "choices": ["query", "prompt"]},
    )
    use_query_weight: bool = field(
        default=True, metadata={"help": "Whether to multiply the advantages by the static query weight."}
    )
    query_weight_min: float = field(default=0.5, metadata={"help": "Lower clip of the query weight."})
    query_weight_max: float = field(default=2.0, metadata={"help": "Upper clip of the query weight."})
    query_weight_normalize: bool = field(
        default=False, metadata={"help": "Whether to divide the clipped weights by their mean over the training set."}
    )
    log_query_kl: bool | None = field(
        default=None,
        metadata={"help": "Whether to log the Query-KL when it does not act on the loss. None: when beta > 0."},
    )
    policy_kl_steps: int = field(
        default=0, metadata={"help": "Log the Policy-KL every this many optimizer steps (needs a reference model)."}
    )
    query_score_batch_tokens: int = field(
        default=4096, metadata={"help": "Padded tokens per forward when the trainer scores the prompts."}
    )

    def __post_init__(self):
        super().__post_init__()
        for name, allowed in {
            "query_kl_estimator": ("k2", "k3"),
            "query_kl_level": ("token", "sequence", "sequence_mean"),
            "query_scope": ("query", "prompt"),
        }.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
        if not self.query_kl_coef >= 0:
            raise ValueError(f"`query_kl_coef` must be at least 0, got {self.query_kl_coef}.")
        if not 0 < self.query_weight_min <= self.query_weight_max:
            raise ValueError(
                "The query weight's clip range needs 0 < `query_weight_min` <= `query_weight_max`, got "
                f"[{self.query_weight_min}, {self.query_weight_max}]."
            )
        for name, least in {"policy_kl_steps": 0, "query_score_batch_tokens": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}.")


@dataclass
class ERPOConfig(QueryRegularizationConfig, GRPOConfig):
    __doc__ = f"""
    Configuration of [`ERPOTrainer`]: [`trl.GRPOConfig`] and the fields below; nothing inherited is changed.
    {QueryRegularizationConfig.__doc__.split(chr(10), 2)[2]}"""


@dataclass
class ERPORLOOConfig(QueryRegularizationConfig, RLOOConfig):
    __doc__ = f"""
    Configuration of [`ERPORLOOTrainer`]: [`trl.RLOOConfig`] and the fields below; nothing inherited is changed.
    {QueryRegularizationConfig.__doc__.split(chr(10), 2)[2]}"""
