"""
The Query-KL: how far the policy's likelihood of the prompts has moved from the reference's (arXiv 2608.23311, §4).

Pure tensors, differentiable in the policy's log-probs; nothing here knows a model or a trainer.
"""

import math

import torch


# e^Δ is continued by its tangent past this Δ: finite, and still pulling back (a clamp would let go there).
TANGENT_FROM = 20.0


def k2(delta: torch.Tensor) -> torch.Tensor:
    """Δ²/2, elementwise. Its gradient in the policy's log-prob is -Δ ∇ℓ: the form of the paper's Proposition 1."""
    return delta.square() / 2


def k3(delta: torch.Tensor) -> torch.Tensor:
    """
    e^Δ - Δ - 1, elementwise and non-negative: the paper's K3 surrogate of the KL.

    For Δ > 20, e^Δ is replaced by its tangent at 20, so that value and gradient stay finite and the gradient keeps
    pulling the policy back.
    """
    exp_minus_1 = torch.expm1(delta.clamp(max=TANGENT_FROM))
    tangent = math.exp(TANGENT_FROM) * torch.relu(delta - TANGENT_FROM)
    return exp_minus_1 + tangent - delta


ESTIMATORS = {"k2": k2, "k3": k3}
LEVELS = ("token", "sequence", "sequence_mean")


def query_kl(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    mask: torch.Tensor,
    estimator: str = "k3",
    level: str = "token",
) -> torch.Tensor:
    """
    The Query-KL surrogate of each query, in nats, with Δ = reference - policy.

    Args:
        logps (`torch.Tensor` of shape `(Q, T)`):
            Log-probs of the prompt tokens under the policy; carries the gradient.
        ref_logps (`torch.Tensor` of shape `(Q, T)`):
            The cached log-probs under the reference; a constant.
        mask (`torch.Tensor` of shape `(Q, T)`):
            Non-zero where a token is scored. Every row needs at least one.
        estimator (`str`):
            `"k3"` or `"k2"`.
        level (`str`):
            `"token"`: mean over the scored tokens of k(Δ_t); `"sequence"`: k(Σ Δ_t), the paper's letter;
            `"sequence_mean"`: k(Σ Δ_t / n).

    Returns:
        `torch.Tensor` of shape `(Q,)`, float32 (float64 for float64 input).

    Raises:
        `KeyError`: unknown estimator. `ValueError`: unknown level.

    Source: the K3 mini-batch surrogate of arXiv 2608.23311 §4.2 and Appendix G; the default level is this project's
    choice (by the chain rule, the per-token conditional KLs sum to the sequence's, at far less variance).
    """
    dtype = torch.promote_types(logps.dtype, torch.float32)
    mask = mask.bool()
    delta = (ref_logps.to(dtype) - logps.to(dtype)).masked_fill(~mask, 0.0)
    k = ESTIMATORS[estimator]
    n_tokens = mask.sum(-1)
    if level == "token":
        return k(delta).sum(-1) / n_tokens  # k(0) = 0: masked tokens add nothing
    if level == "sequence":
        return k(delta.sum(-1))
    if level == "sequence_mean":
        return k(delta.sum(-1) / n_tokens)
    raise ValueError(f"`level` must be one of {', '.join(map(repr, LEVELS))}, got {level!r}.")
