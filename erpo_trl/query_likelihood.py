"""
From a forward pass to prompt-token log-probs: ℓ(q) = Σ_t log P(x_t | x_<t) (arXiv 2608.23311, §4 and Appendix F).

Besides the trainers, the one module that leans on TRL's internals. What it uses was read from TRL 1.16.0:
`GRPOTrainer._tokenize_prompts`, `add_fused_lm_head` with `model(..., labels=..., fused_lm_head=True).log_probs`, and
the width of that head's tiles, `_CHUNKED_LOGPROB_CHUNK_SIZE`.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn


@dataclass(frozen=True)
class QuerySpan:
    """
    Which tokens of every prompt are scored: all but the first `start` and the last `end`.

    `start` is at least 1: the first token has no conditional, and is never scored.
    """

    start: int = 1
    end: int = 0

    def n_scored(self, prompt_length: int) -> int:
        """Scored tokens of a prompt of this many tokens."""
        return prompt_length - self.start - self.end


def common_span(prompts: Iterator[np.ndarray]) -> QuerySpan | None:
    """
    The span left when the longest token prefix and suffix common to all prompts are dropped (`query_scope="query"`).

    At least one token of every prompt stays in the span. `None` if nothing varies. Prompts need two tokens or more.
    """
    prompts = iter(prompts)
    first = next(prompts)
    prefix = suffix = shortest = len(first)
    varies = False
    for ids in prompts:
        varies = varies or not np.array_equal(ids, first)
        shortest = min(shortest, len(ids))
        prefix = _n_equal(first[:prefix], ids[:prefix])
        suffix = _n_equal(first[::-1][:suffix], ids[::-1][:suffix])
    if not varies:
        return None
    start = max(1, min(prefix, shortest - 1))
    return QuerySpan(start, min(suffix, shortest - start - 1))


def _n_equal(a: np.ndarray, b: np.ndarray) -> int:
    """Leading elements in which two arrays agree."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def trainer_chat_template(processing_class, tools: Sequence[Callable] | None) -> str | None:
    """The template that `GRPOTrainer` puts in the place of the tokenizer's own, if it does (with tools)."""
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    if tools and not is_chat_template_prefix_preserving(processing_class):
        return get_training_chat_template(processing_class)
    return None


def prompt_tokenizer(
    processing_class,
    chat_template: str | None = None,
    chat_template_kwargs: dict | None = None,
    tools: Sequence[Callable] | None = None,
) -> Callable[[list], list[list[int]]]:
    """The trainer's own way from dataset prompts (strings or conversations) to token ids, without a trainer."""
    from transformers import ProcessorMixin
    from trl import GRPOTrainer

    trainer = SimpleNamespace(
        processing_class=processing_class,
        _is_vlm=isinstance(processing_class, ProcessorMixin),
        environment_factories=None,
        tools=tools,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs or {},
    )
    return lambda prompts: GRPOTrainer._tokenize_prompts(trainer, prompts)[0]


class PromptScoringModel:
    """
    Around the policy for one forward of TRL's loss: un-masks prompt labels, and keeps the log-probs that they give.

    TRL masks every prompt label. Un-masked, the same forward also projects those positions through the LM head; the
    completion's part of the output is handed on as it is.

    Args:
        model (`Callable`):
            The policy, wrapped or not, with TRL's fused LM head.
        prompt_labels (`torch.Tensor` of shape `(B, P)`):
            The prompt's token ids where they are to be scored, -100 elsewhere.

    After the call, `prompt_logps` `(B, P-1)` holds the log-prob of the prompt's tokens from the second on, float32, 0
    where not scored, and `completion_logps` `(B, C)` those of the completion.
    """

    def __init__(self, model: Callable, prompt_labels: torch.Tensor):
        self.model = model
        self.prompt_labels = prompt_labels

    def __call__(self, *args, labels: torch.Tensor, **kwargs):
        n_prompt = self.prompt_labels.size(1)
        labels = torch.cat([self.prompt_labels, labels[:, n_prompt:]], dim=1)  # (B, P+C)
        outputs = self.model(*args, labels=labels, **kwargs)
        # From the right: prompt-learning adapters prepend virtual tokens
        log_probs = outputs.log_probs[:, 1 - labels.size(1) :]  # (B, P+C-1)
        self.prompt_logps, self.completion_logps = log_probs.split([n_prompt - 1, labels.size(1) - n_prompt], dim=1)
        return outputs


@torch.no_grad()
def score_token_ids(
    model: Callable, device: torch.device, prompts: Sequence[np.ndarray], span: QuerySpan
) -> list[np.ndarray]:
    """
    Log-probs (float32, nats) of the scored tokens of each prompt, from one forward without gradient.

    Args:
        model (`Callable`):
            A causal LM under [`fused_lm_head`], or one of TRL's trainers' models.
        prompts (sequence of `(T,)` integer arrays):
            Token ids; right-padded here, so that learned absolute positions are right too.
        span (`QuerySpan`):
            What to score. The tokens dropped at the end are not even fed.
    """
    lengths = [len(ids) - span.end for ids in prompts]
    input_ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)  # (B, T)
    attention_mask = torch.zeros_like(input_ids)
    labels = torch.full_like(input_ids, -100)
    for row, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        fed = torch.from_numpy(ids[:length].astype(np.int64))
        input_ids[row, :length] = fed
        attention_mask[row, :length] = 1
        labels[row, span.start : length] = fed[span.start :]
    with _narrow_tiles(device):
        outputs = model(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            labels=labels.to(device),
            fused_lm_head=True,
        )
    log_probs = outputs.log_probs[:, 1 - input_ids.size(1) :].float().cpu().numpy()  # (B, T-1)
    return [log_probs[row, span.start - 1 : length - 1] for row, length in enumerate(lengths)]


@contextmanager
def _narrow_tiles(device: torch.device):
    """
    On CPU, TRL's LM head in tiles narrow enough for the cache: without Triton it goes over each tile of logits several
    times. TRL's own width, made for GPUs, takes 2 to 4 times as long there and several times the memory.
    """
    from trl.trainer import utils

    width = utils._CHUNKED_LOGPROB_CHUNK_SIZE
    if torch.device(device).type == "cpu":
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = 512
    try:
        yield
    finally:
        utils._CHUNKED_LOGPROB_CHUNK_SIZE = width


@contextmanager
def fused_lm_head(model: nn.Module, temperature: float):
    """`model` with TRL's fused LM head at this temperature, for the duration of the context."""
    from trl.trainer.utils import add_fused_lm_head

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    previous = base.__dict__.get("forward")
    add_fused_lm_head(base, temperature=temperature)
    try:
        yield model
    finally:
        if previous is None:
            del base.forward
        else:
            base.forward = previous


@contextmanager
def evaluation_mode(model: nn.Module):
    """Dropout off for the duration of the context."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def preserved_random_states():
    """The global random states of python, numpy and torch are afterwards what they were before."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if device_states is not None:
            torch.cuda.set_rng_state_all(device_states)


def agreement_tolerance(dtypes: Sequence[str], n_layers: int) -> float:
    """
    By how much, in nats per token (mean absolute difference), two forwards of one model may differ by rounding.

    One rounding is off by at most the dtype's unit roundoff u, relatively, and by 0.43 u rms. In a log-prob,
    z_t - log Σ_v e^{z_v}, it comes in twice:

    - The fused LM head rounds the logit z_t, about 30 in size: 0.43 u · 30 = 13 u.
    - Each of the 2L residual updates, the embedding and the last norm make some six roundings, √6 · 0.43 u ≈ u. In a
      residual stream that does not grow, the last hidden state is off by u √(2L+2) of its size, in a random
      direction: a logit is then off by that times the logits' standard deviation over the vocabulary, about 4, and
      z_t and the normalizer are both logits: √2 · 4 · u √(2L+2).

    The errors are independent and normal (mean size √(2/π) of their rms), and those of the two forwards add (√2).
    In bfloat16 that is 0.20 for 30 layers, where a chat model of 135M parameters measured 0.04 to 0.05, and with 3 %
    of noise on its weights 0.30. Never below 1e-3, to which float32 back-ends agree per token.
    """
    unit_roundoff = max(torch.finfo(getattr(torch, dtype)).eps for dtype in dtypes) / 2
    if getattr(torch.backends.cuda.matmul, "fp32_precision", None) == "tf32":  # of float32, matmuls keep 11 bits
        unit_roundoff = max(unit_roundoff, 2**-11)
    rms = unit_roundoff * (13**2 + 2 * 4**2 * (2 * n_layers + 2)) ** 0.5
    return max(1e-3, (2 / math.pi) ** 0.5 * 2**0.5 * rms)


def has_learned_absolute_positions(model: nn.Module) -> bool:
    """
    Whether the model (GPT-2, GPT-Neo, …) looks positions up in a table by column, whatever the attention mask.

    Such a model gives other log-probs to a left-padded row, since TRL 1.16 passes no position ids when it trains. Of
    those whose table has a class of its own (BioGPT, XGLM, BART, …), OPT counts by the attention mask and is right.
    """
    config = model.config.get_text_config()
    n_positions = getattr(config, "max_position_embeddings", None)  # GPT-2's `n_positions` is mapped to it
    return any(
        type(module) is nn.Embedding
        and module.num_embeddings == n_positions
        and module is not model.get_input_embeddings()
        or "PositionalEmbedding" in type(module).__name__
        and config.model_type != "opt"
        for module in model.modules()
    )
