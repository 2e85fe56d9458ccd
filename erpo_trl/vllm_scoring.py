"""
Reference scores from vLLM: for a reference that is split over several GPUs, or when vLLM is there anyway.

What it uses was read from vLLM 0.31: `SamplingParams(prompt_logprobs=0)` gives the log-prob of each prompt token, of
logits that no temperature has touched; `logprobs_mode="raw_logprobs"`; `llm.llm_engine.engine_core.shutdown()`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from .query_likelihood import QuerySpan


def vllm_score(llm, prompts: Sequence[np.ndarray], span: QuerySpan) -> list[np.ndarray]:
    """
    Log-probs (float32, nats) of the scored tokens of each prompt: [`score_token_ids`] with vLLM's forward.

    vLLM batches and splits the prompts itself, so that all of a dataset's may be given at once.

    Args:
        llm (`vllm.LLM`):
            With `logprobs_mode="raw_logprobs"`, its default.
        prompts (sequence of `(T,)` integer arrays):
            Token ids.
        span (`QuerySpan`):
            What to score. The tokens dropped at the end are not even fed.

    Returns:
        Per prompt, an array of shape `(span.n_scored(T),)`.

    Raises:
        ValueError: for a prompt that leaves no room for the one token that vLLM must generate after it.
    """
    from vllm import SamplingParams

    fed = [ids[: len(ids) - span.end].tolist() for ids in prompts]
    limit = llm.model_config.max_model_len
    for row, ids in enumerate(fed):
        if len(ids) >= limit:
            raise ValueError(
                f"Prompt {row} of this batch is {len(ids)} tokens long, and vLLM takes {limit - 1} here (it must "
                f"generate one more): set `max_model_len` to {len(ids) + 1} or more if the model has as many "
                "positions, or drop the row."
            )
    params = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0.0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in fed], params, use_tqdm=False)
    return [
        np.array(
            [
                output.prompt_logprobs[t][token].logprob  # a dict, of this one token
                for t, token in enumerate(ids)
                if t >= span.start
            ],
            dtype=np.float32,
        )
        for ids, output in zip(fed, outputs, strict=True)
    ]


@contextmanager
def vllm_reference(
    model: str,
    dtype: str,
    temperature: float = 1.0,
    tensor_parallel_size: int = 1,
    max_model_len: int | None = None,
    engine_kwargs: dict | None = None,
) -> Iterator[Callable[[Sequence[np.ndarray], QuerySpan], list[np.ndarray]]]:
    """
    A vLLM engine for the duration of the context, as a function `score(prompts, span)`: see [`vllm_score`].

    Args:
        model (`str`):
            Folder or Hub id.
        dtype (`str`):
            Of weights and forward: `"float32"`, `"bfloat16"`, `"float16"`. Not `"auto"`, under which vLLM runs a
            float32 checkpoint in 16 bits.
        temperature (`float`):
            The trainer's sampling temperature; vLLM's prompt log-probs are those of 1.0.
        tensor_parallel_size (`int`):
            GPUs to split the model over.
        max_model_len (`int`, *optional*):
            The longest prompt and one token; bounds the memory that vLLM reserves. Defaults to the model's positions.
        engine_kwargs (`dict`, *optional*):
            Further arguments of `vllm.LLM`, such as `revision`, `gpu_memory_utilization` or `enforce_eager`.

    Raises:
        ValueError: for a `temperature` other than 1.0, or the dtype `"auto"`.
        ImportError: without vLLM.
    """
    if temperature != 1.0:
        raise ValueError(
            f"`temperature` is {temperature}, and vLLM gives prompt log-probs at temperature 1.0 only: score with "
            "the transformers back-end (without `--backend vllm`)."
        )
    if dtype == "auto":
        raise ValueError("`dtype` is 'auto', and a score carries its dtype: say 'float32', 'bfloat16' or 'float16'.")
    try:
        from vllm import LLM
    except ImportError as error:
        raise ImportError(
            "Scoring with vLLM needs it installed: pip install 'erpo-trl[vllm]', or use the transformers back-end "
            "(without `--backend vllm`)."
        ) from error
    engine_kwargs = dict(engine_kwargs or {})
    if max_model_len is not None:
        engine_kwargs["max_model_len"] = max_model_len
    llm = LLM(
        model=model,
        dtype=dtype,
        tensor_parallel_size=tensor_parallel_size,
        logprobs_mode="raw_logprobs",  # others would be logits
        **engine_kwargs,
    )
    try:
        yield partial(vllm_score, llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
