"""The static query weight: likelier prompts under the reference weigh more (arXiv 2608.23311, Eq. 9, Appendix I)."""

import torch


def query_weight(
    ref_query_logp: torch.Tensor,
    mean_nll: float | None = None,
    weight_min: float = 0.5,
    weight_max: float = 2.0,
    normalize: bool = False,
) -> torch.Tensor:
    """
    w_i = clip(s̄ / s_i, w_min, w_max), with s_i = -ℓ_ref(q_i).

    Args:
        ref_query_logp (`torch.Tensor` of shape `(N,)`):
            ℓ_ref(q_i), the summed log-prob of each prompt's scored tokens under the reference, in nats.
        mean_nll (`float`, *optional*):
            s̄, the mean of s over the training prompts, in nats. `None`: the mean over these N.
        weight_min (`float`), weight_max (`float`):
            The clip range. The paper does not print its own; [0.5, 2.0] is this project's choice.
        normalize (`bool`):
            Whether to divide the clipped weights by their mean over these N (this project's addition; off by default).

    Returns:
        `torch.Tensor` of shape `(N,)`, in the input's dtype; dimensionless.

    Raises:
        `ValueError`: an empty clip range or one that reaches 0.
    """
    if not 0 < weight_min <= weight_max:
        raise ValueError(
            f"The clip range needs 0 < weight_min <= weight_max, got weight_min={weight_min}, weight_max={weight_max}."
        )
    # A prompt that the reference finds certain has s = 0: the likeliest there is, so its weight is the upper clip.
    nll = (-ref_query_logp).clamp(min=torch.finfo(ref_query_logp.dtype).tiny)
    mean_nll = nll.mean() if mean_nll is None else mean_nll
    weight = (mean_nll / nll).clamp(weight_min, weight_max)
    return weight / weight.mean() if normalize else weight
