"""
Sampling back-ends behind one small interface: transformers, vLLM in this process, or any OpenAI-compatible server.

All get the token ids that training would feed, sample from the whole distribution (top_p 1, no top-k, no penalties,
whatever the model's `generation_config.json` says), and stop on every end-of-sequence token of model and tokenizer.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..prompts import to_messages
from ..query_likelihood import evaluation_mode, preserved_random_states, prompt_tokenizer


@dataclass(frozen=True)
class Completion:
    """One sampled completion: its text without special tokens, its token ids (end of sequence included), whether it
    was cut off at the token limit."""

    text: str
    token_ids: list[int]
    truncated: bool


class Sampler(Protocol):
    """A model to sample from."""

    tokenizer: Any

    def sample(
        self, prompts: Sequence[list[int]], *, n: int, temperature: float, seed: int, max_new_tokens: int
    ) -> Iterator[tuple[int, list[Completion]]]:
        """
        Draws `n` completions of each prompt; yields `(index of the prompt, its completions)` as prompts finish.

        Args:
            prompts: Token ids of each prompt.
            n: Completions per prompt; 1 where `temperature` is 0.
            temperature: 0 is greedy decoding.
            seed: The same seed and arguments (batch size included) give the same completions on the same back-end
                and hardware; other back-ends draw others from the same distribution.
            max_new_tokens: Tokens after which a completion is cut off.
        """
        ...


def tokenize_questions(tokenizer, questions: Sequence[str], chat_template_kwargs: dict | None = None):
    """
    Token ids of each question under the training prompt, by the trainer's own tokenizing.

    A tokenizer without chat template gets the same text as a plain string.
    """
    messages = [to_messages(question) for question in questions]
    if tokenizer.chat_template is None:
        messages = [turns[0]["content"] for turns in messages]
    return prompt_tokenizer(tokenizer, chat_template_kwargs=chat_template_kwargs)(messages)


def eos_token_ids(tokenizer, generation_config) -> list[int]:
    """Every token that ends a completion: the tokenizer's and the generation config's, which may list several."""
    eos = generation_config.eos_token_id
    ids = set(eos if isinstance(eos, list) else [eos]) | {tokenizer.eos_token_id}
    ids.discard(None)
    if not ids:
        raise ValueError(
            "Neither the tokenizer nor the generation config names an end-of-sequence token, so that every completion "
            "would run to its limit; set `tokenizer.eos_token`."
        )
    return sorted(ids)


def load_eos_token_ids(model: str, tokenizer) -> list[int]:
    """`eos_token_ids` of a model folder or Hub id that is served elsewhere."""
    from transformers import AutoConfig, GenerationConfig

    try:
        generation_config = GenerationConfig.from_pretrained(model)
    except OSError:  # not every model has the file
        generation_config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(model))
    return eos_token_ids(tokenizer, generation_config)


def check_lengths(prompts: Sequence[list[int]], max_new_tokens: int, limit: int | None) -> None:
    """Raises if some prompt leaves less than `max_new_tokens` of the model's `limit` positions."""
    for row, ids in enumerate(prompts):
        if limit is not None and len(ids) + max_new_tokens > limit:
            raise ValueError(
                f"Question {row}: prompt of {len(ids)} tokens + max_new_tokens = {max_new_tokens} exceed the model's "
                f"{limit} positions; use max_new_tokens <= {limit - len(ids)}."
            )


class TransformersSampler:
    """
    Batched `generate`, longest prompts first: little padding, and memory runs out at once or never.

    Leaves the model's mode and the global random states as they were.

    Args:
        model: A causal LM in memory, on its device.
        tokenizer: Its tokenizer; needs no pad token and no particular padding side.
        batch_size: Completions generated at once.
    """

    def __init__(self, model, tokenizer, batch_size: int = 64):
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.eos = eos_token_ids(tokenizer, model.generation_config)

    def sample(self, prompts, *, n, temperature, seed, max_new_tokens):
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        check_lengths(prompts, max_new_tokens, limit)
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        rows = [i for i in order for _ in range(n)]
        finished = {i: [] for i in order}
        with evaluation_mode(self.model), preserved_random_states():
            torch.manual_seed(seed)
            for start in range(0, len(rows), self.batch_size):
                batch = rows[start : start + self.batch_size]
                completions = self._generate([prompts[i] for i in batch], temperature, max_new_tokens)
                for i, completion in zip(batch, completions, strict=True):
                    finished[i].append(completion)
                    if len(finished[i]) == n:
                        yield i, finished.pop(i)

    def _generate(self, prompts, temperature, max_new_tokens) -> list[Completion]:
        from transformers import GenerationConfig

        pad = self.eos[0] if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        width = max(map(len, prompts))
        input_ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in prompts])  # (B, P), left-padded
        attention_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        # Options left at None would be filled in from the model's own generation config
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
        sampling = {"do_sample": True, "temperature": temperature, **neutral} if temperature else {"do_sample": False}
        config = GenerationConfig(
            **sampling,
            max_new_tokens=max_new_tokens,
            min_new_tokens=0,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            eos_token_id=self.eos,
            pad_token_id=pad,
        )
        device = self.model.device
        output = self.model.generate(
            input_ids.to(device), attention_mask=attention_mask.to(device), generation_config=config
        )
        return [self._completion(ids) for ids in output[:, width:].tolist()]

    def _completion(self, ids: list[int]) -> Completion:
        end = next((t + 1 for t, token in enumerate(ids) if token in self.eos), None)
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        return Completion(text, ids[:end], truncated=end is None)


class VLLMSampler:
    """
    vLLM in this process (extra `vllm`).

    Args:
        model: Folder or Hub id.
        tokenizer: Its tokenizer.
        llm_kwargs: For `vllm.LLM`: `tensor_parallel_size`, `dtype`, `gpu_memory_utilization`, `enforce_eager`, … The
            CPU build of vLLM 0.31 needs `enable_chunked_prefill=False`: a seeded request whose prompt it splits ends
            the engine ("CPU Generator does not use offset").
    """

    def __init__(self, model: str, tokenizer, **llm_kwargs):
        try:
            from vllm import LLM
        except ImportError as error:
            raise ImportError(
                "backend 'vllm' needs vLLM: pip install 'erpo-trl[vllm]', or use --backend transformers."
            ) from error
        self.tokenizer = tokenizer
        self.eos = load_eos_token_ids(model, tokenizer)
        self.llm = LLM(model=model, **llm_kwargs)

    def sample(self, prompts, *, n, temperature, seed, max_new_tokens):
        from vllm import SamplingParams

        # vLLM itself would cut off completions there, before `max_new_tokens`
        check_lengths(prompts, max_new_tokens, self.llm.model_config.max_model_len)
        params = [
            SamplingParams(
                n=n,
                temperature=temperature,
                top_p=1.0,
                max_tokens=max_new_tokens,
                seed=question_seed(seed, i, n),
                stop_token_ids=self.eos,
            )
            for i in range(len(prompts))
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        for i, output in enumerate(outputs):
            yield i, [Completion(o.text, list(o.token_ids), o.finish_reason == "length") for o in output.outputs]


class OpenAISampler:
    """
    A server with the OpenAI completions protocol (`vllm serve`, SGLang, …), one request per question.

    Prompts go over as token ids, so that the server applies no template of its own. A server does not say how its
    completions were tokenized; their token ids are their text, tokenized again.

    Args:
        base_url: As the OpenAI client takes it, such as `http://127.0.0.1:8000/v1`. The environment variable
            `OPENAI_API_KEY` is sent if set.
        model: Folder or Hub id, for its end-of-sequence tokens.
        tokenizer: Its tokenizer.
        served_name: The model's name on the server; defaults to `model`.
        extra_body: Fields beyond OpenAI's own. The default turns off a vLLM or SGLang server's defaults from the
            model's generation config and names the stop tokens; `{}` for a server that refuses unknown fields.
        concurrency: Requests under way at once.
        timeout: Seconds that one request may take.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        tokenizer,
        served_name: str | None = None,
        extra_body: dict | None = None,
        concurrency: int = 64,
        timeout: float = 3600,
    ):
        self.url, self.model, self.tokenizer = base_url.rstrip("/") + "/completions", served_name or model, tokenizer
        self.concurrency, self.timeout = concurrency, timeout
        eos = load_eos_token_ids(model, tokenizer)
        neutral = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "stop_token_ids": eos}
        self.extra_body = neutral if extra_body is None else extra_body

    def sample(self, prompts, *, n, temperature, seed, max_new_tokens):
        def request(i):
            body = {"prompt": prompts[i], "n": n, "temperature": temperature, "top_p": 1, "max_tokens": max_new_tokens}
            return self._post(body | {"seed": question_seed(seed, i, n)})

        pool = ThreadPoolExecutor(self.concurrency)
        try:
            futures = {pool.submit(request, i): i for i in range(len(prompts))}
            for future in as_completed(futures):
                yield futures[future], [self._completion(choice) for choice in future.result()["choices"]]
        finally:
            pool.shutdown(cancel_futures=True)

    def _post(self, body: dict) -> dict:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = json.dumps({"model": self.model, **body, **self.extra_body}).encode()
        request = urllib.request.Request(self.url, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{self.url} answered {error.code}: {error.read(2000).decode()}") from error
        except OSError as error:
            raise RuntimeError(
                f"No answer from {self.url} ({error}); check --base_url, then run the same command again: it goes on "
                "after the last finished temperature."
            ) from error

    def _completion(self, choice: dict) -> Completion:
        truncated = choice["finish_reason"] == "length"
        ids = self.tokenizer(choice["text"], add_special_tokens=False)["input_ids"]
        ids = ids if truncated or self.tokenizer.eos_token_id is None else [*ids, self.tokenizer.eos_token_id]
        return Completion(choice["text"], ids, truncated)


def question_seed(seed: int, question: int, n: int) -> int:
    """Seed of a question's request. vLLM counts on from it for the question's n samples, so that no two samples of one
    benchmark share a seed."""
    return seed * 1_000_003 + question * n
