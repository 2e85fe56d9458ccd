"""Prompt likelihood against response likelihood (Appendix D of arXiv 2608.23311)."""

from collections.abc import Sequence

import numpy as np

from ..query_likelihood import QuerySpan, evaluation_mode, fused_lm_head, score_token_ids
from .sampling import TransformersSampler


def prompt_response_nlls(
    model, tokenizer, prompts: Sequence[list[int]], seed: int = 0, max_new_tokens: int = 3072, batch_size: int = 8
) -> tuple[np.ndarray, np.ndarray]:
    """
    Samples one response to each prompt at temperature 1, and sums the negative log-likelihood of each part.

    Args:
        model, tokenizer: A causal LM in memory.
        prompts: Token ids.
        seed, max_new_tokens: Of the sampling.
        batch_size: Sequences at once, in sampling and in scoring.

    Returns:
        NLLs in nats of prompts (without their first token, which has no conditional) and responses, both `(N,)`.
    """
    sampler = TransformersSampler(model, tokenizer, batch_size)
    drawn = dict(sampler.sample(prompts, n=1, temperature=1.0, seed=seed, max_new_tokens=max_new_tokens))
    sequences = [np.array([*ids, *drawn[i][0].token_ids]) for i, ids in enumerate(prompts)]
    nlls = np.zeros((2, len(prompts)))
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))  # alike lengths pad little
    with evaluation_mode(model), fused_lm_head(model, temperature=1.0):
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            scored = score_token_ids(model, model.device, [sequences[i] for i in batch], QuerySpan())
            for i, logps in zip(batch, scored, strict=True):
                split = len(prompts[i]) - 1
                nlls[:, i] = -logps[:split].sum(dtype=np.float64), -logps[split:].sum(dtype=np.float64)
    return nlls[0], nlls[1]


def nll_correlation(
    prompt_nll: Sequence[float], response_nll: Sequence[float], tail: float = 0.05
) -> dict[str, float]:
    """
    Pearson correlation of prompt and response NLL, with and without the least likely prompts.

    Args:
        prompt_nll, response_nll: `(N,)`, nats.
        tail: Share of the prompts, those of largest NLL, left out of the second figure.

    Returns:
        `all`, `without_tail`, `tail_bound` (the prompt NLL above which the tail lies), `questions`. A correlation is
        nan where one side does not vary.

    Raises:
        ValueError: with fewer than 3 questions.
    """
    prompt_nll, response_nll = np.asarray(prompt_nll, float), np.asarray(response_nll, float)
    if len(prompt_nll) < 3:
        raise ValueError(f"A correlation needs at least 3 questions, got {len(prompt_nll)}.")
    bound = float(np.quantile(prompt_nll, 1 - tail))
    inside = prompt_nll <= bound

    def pearson(x, y):
        return float(np.corrcoef(x, y)[0, 1]) if np.ptp(x) and np.ptp(y) else float("nan")

    return {
        "all": pearson(prompt_nll, response_nll),
        "without_tail": pearson(prompt_nll[inside], response_nll[inside]),
        "tail_bound": bound,
        "questions": len(prompt_nll),
    }
