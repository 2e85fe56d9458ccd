"""
ERPO on TRL's online trainers (arXiv 2608.23311): a Query-KL in the loss, and a static query weight on the advantages.

[`QueryRegularizationMixin`] goes in front of a TRL trainer and uses these of its hooks, as read from TRL 1.16.0:
`_generate_and_score_completions` (a dict whose tensors are shuffled and split together), `compute_loss(model, inputs)`
(its one forward goes through `model(..., labels=..., fused_lm_head=True)`), `_tokenize_prompts`,
`_get_per_token_logps_and_entropies`, `_set_signature_columns_if_needed`, `_metrics`, `_step`, `loss_is_scaled_for_ga`.
"""

import textwrap
from collections import Counter, defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import ModelCard
from torch import nn
from transformers.utils.hub import hf_api
from trl import GRPOTrainer, RLOOTrainer
from trl.models.utils import disable_gradient_checkpointing, prepare_deepspeed
from trl.trainer.utils import use_adapter

from . import cards
from .config import ERPOConfig, ERPORLOOConfig
from .query_kl import k3, query_kl
from .query_likelihood import (
    PromptScoringModel,
    agreement_tolerance,
    evaluation_mode,
    has_learned_absolute_positions,
    preserved_random_states,
    score_token_ids,
)
from .scoring import (
    SCORE_COLUMNS,
    QueryScorer,
    ScoreIdentity,
    forward_dtype,
    model_positions,
    tokenizer_hash,
    weights_hash,
)


class QueryRegularizationMixin:
    """
    Input-side regularization for a TRL online trainer: `class ERPOTrainer(QueryRegularizationMixin, GRPOTrainer)`.

    What is different from the trainer behind it; everything else is inherited:

    - The prompts of `train_dataset` and `eval_dataset` are scored under the initial policy when the trainer is made,
      unless they come with the columns of [`score_queries`].
    - The prompts' log-probs are read off the forward that the policy gradient makes anyway, for one row per distinct
      prompt of a micro-batch, and `query_kl_coef` times their Query-KL is added to the loss: L = L_PG + α R̂.
    - Advantages are multiplied by the query weight.
    - Logged: `query_kl`, `query_kl_loss` (α-scaled), `query_nll` (nats per token), `query_weight/{mean,min,max}`, and
      with `policy_kl_steps`, `policy_kl`.
    """

    _config_class = None  # set by the trainers

    def __init__(self, model, reward_funcs=None, args=None, *rest, **kwargs):
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = self._config_class(f"{name.split('/')[-1]}-{self._name}")
        if not isinstance(args, self._config_class):
            raise TypeError(
                f"`args` must be an `{self._config_class.__name__}`, got a `{type(args).__name__}`: write "
                f"`from erpo_trl import {self._config_class.__name__}` and give it the same fields."
            )
        if args.policy_kl_steps and args.beta:
            raise ValueError(
                f"`policy_kl_steps={args.policy_kl_steps}` is for runs without a Policy-KL; with `beta={args.beta}` "
                "it is logged as `kl` at every step. Set one of them to 0."
            )
        if args.policy_kl_steps and args.sync_ref_model:
            raise ValueError(
                f"`policy_kl_steps={args.policy_kl_steps}` measures the KL to the initial model, and "
                "`sync_ref_model=True` would move that. Set `sync_ref_model=False`, or `policy_kl_steps=0`."
            )
        with _reference_model(args):
            super().__init__(model, reward_funcs, args, *rest, **kwargs)
        self.beta = args.beta
        self._policy_kl_step = -args.policy_kl_steps  # the optimizer step at which the Policy-KL was last measured
        self._query_sums = {"train": defaultdict(float), "eval": defaultdict(float)}
        acts = args.query_kl_coef > 0 or args.use_query_weight
        logs = args.beta > 0 if args.log_query_kl is None else args.log_query_kl
        self._uses_queries = acts or logs
        if self._uses_queries:
            self._absolute_positions = has_learned_absolute_positions(self.accelerator.unwrap_model(self.model))
            self._prepare_scores()

    # Scores of the datasets

    def _prepare_scores(self):
        """Check the datasets' scores, or make them."""
        if getattr(self, "_multi_environment", False):
            raise ValueError(
                "With an `environment_factory` of several environments, the same prompt is rendered with the tools of "
                "its row's environment, and prompts are scored without them. Pass one environment, or set "
                "`query_kl_coef=0, use_query_weight=False`."
            )
        expected = self._expected_identity()
        scorer = None
        if _is_scored(self.train_dataset, "train"):
            self._query_identity = _one_identity(self.train_dataset, "train")
            self._check_identity(self._query_identity, expected, self.train_dataset, "train")
        else:
            scorer = self._scorer(expected)
            self.train_dataset = self._score(scorer, self.train_dataset, "train")
            self._query_identity = scorer.identity
        if self.eval_dataset is None:
            return
        named = isinstance(self.eval_dataset, dict)
        splits = dict(self.eval_dataset) if named else {"eval": self.eval_dataset}
        for name, dataset in splits.items():
            if _is_scored(dataset, name):
                self._check_identity(_one_identity(dataset, name), self._query_identity, dataset, name)
            else:
                scorer = scorer or self._scorer(replace(self._query_identity, model=""))
                splits[name] = self._score(scorer, dataset, name)
        self.eval_dataset = splits if named else splits["eval"]

    def _expected_identity(self) -> ScoreIdentity:
        """What scores must have been made with to be used here; model and dtype are judged by the numbers."""
        args = self.args
        whole_prompt = args.query_scope == "prompt"
        return ScoreIdentity(
            model="",
            tokenizer=tokenizer_hash(self.processing_class, **self._tokenizing()),
            dtype="",
            temperature=float(self.temperature),
            scope=args.query_scope,
            weight_min=args.query_weight_min,
            weight_max=args.query_weight_max,
            start=1 if whole_prompt else None,
            end=0 if whole_prompt else None,
            weight_normalized=args.query_weight_normalize,
            weight_mean=None if args.query_weight_normalize else 1.0,
        )

    def _tokenizing(self) -> dict:
        return {
            "chat_template": getattr(self, "chat_template", None),
            "chat_template_kwargs": self.chat_template_kwargs,
            "tools": getattr(self, "tools", None),
        }

    def _prompt_token_ids(self, prompts: list) -> list[list[int]]:
        if getattr(self, "environment_factories", None) is not None:
            self._batch_environments = [None] * len(prompts)
        return self._tokenize_prompts(prompts)[0]

    def _scorer(self, identity: ScoreIdentity) -> QueryScorer:
        """A scorer under the policy as it is now."""
        with self.accelerator.autocast():
            identity = replace(identity, model=weights_hash(self.model), dtype=forward_dtype(self.model))
        return QueryScorer(
            self._reference,
            self._prompt_token_ids,
            identity,
            max_length=model_positions(self.model.config),
            batch_tokens=self.args.query_score_batch_tokens,
            main_process_only=self.is_fsdp_enabled,  # only there are the weights sure to be loaded
        )

    @contextmanager
    def _reference(self):
        """The policy as it is now, ready to score outside the training loop."""
        model, device, home = self.model, self.accelerator.device, self.model.device
        with preserved_random_states(), evaluation_mode(model):
            if self.is_deepspeed_enabled:  # places the weights, and gathers them layer by layer under ZeRO-3
                model = prepare_deepspeed(model, self.accelerator)
            elif self.is_fsdp_enabled:  # which leaves the weights where they were loaded until training starts
                model.to(device)
            try:
                with self.accelerator.autocast():
                    yield partial(score_token_ids, model, device)
            finally:
                if self.is_deepspeed_enabled:
                    model.destroy()  # left alive, its hooks would break the later generation
                elif self.is_fsdp_enabled:
                    model.to(home)

    def _score(self, scorer: QueryScorer, dataset, name: str) -> Dataset:
        if not isinstance(dataset, Dataset):
            raise ValueError(
                f"The {name} dataset is a `{type(dataset).__name__}`, which can't be scored ahead of training. "
                "Add the scores as it is read: `erpo_trl.score_queries(dataset, model, tokenizer, span=..., "
                "mean_nll=...)`."
            )
        return scorer.score(dataset, name)

    def _check_identity(self, found: ScoreIdentity, expected: ScoreIdentity, dataset, name: str):
        """Raise if scores were made for another set-up than `expected`; what is `None` there is not compared."""
        if found.tokenizer != expected.tokenizer:
            raise ValueError(
                f"The {name} dataset was scored with another tokenizer, chat template, `chat_template_kwargs` or "
                f"tools than this trainer's. {self._first_mismatch(found, dataset)} Score it again with "
                "`erpo_trl.score_queries` and the trainer's tokenizer, `chat_template_kwargs` and tools."
            )
        options = {
            "temperature": "temperature",
            "scope": "query_scope",
            "start": "query_scope",
            "end": "query_scope",
            **(
                {"weight_min": "query_weight_min", "weight_max": "query_weight_max"}
                if self.args.use_query_weight
                else {}
            ),
        }
        for field, option in options.items():
            was, is_now = getattr(found, field), getattr(expected, field)
            if is_now is not None and was != is_now:
                raise ValueError(
                    f"The {name} dataset was scored with {field} = {was!r}, and this trainer has {is_now!r}. Score it "
                    f"again with `erpo_trl.score_queries` (known scores are taken from the cache), or set `{option}` "
                    "to what it was scored with."
                )
        if self.args.use_query_weight and found.weight_normalized != expected.weight_normalized:
            raise ValueError(
                f"The {name} dataset's weights are {'' if found.weight_normalized else 'not '}normalized, and this "
                f"trainer has `query_weight_normalize={self.args.query_weight_normalize}`. Score it again with "
                "`erpo_trl.score_queries(..., normalize_weight=...)`."
            )

    def _first_mismatch(self, identity: ScoreIdentity, dataset) -> str:
        for row, example in enumerate(dataset):
            scored = len(example["ref_query_logps"]) + identity.start + identity.end
            length = len(self._prompt_token_ids([example["prompt"]])[0])
            if scored != length:
                return f"Row {row}: {scored} tokens when scored, {length} here."
        return "Its prompts have as many tokens here as when scored, but not the same."

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        if self._uses_queries:
            self._signature_columns += [column for column in SCORE_COLUMNS if column not in self._signature_columns]

    # Rollouts

    def _generate_and_score_completions(self, inputs):
        scores = [{column: row.get(column) for column in SCORE_COLUMNS} for row in inputs]
        # Reward functions and environments see the columns that they would see without us
        inputs = [{k: v for k, v in row.items() if k not in SCORE_COLUMNS} for row in inputs]
        output = super()._generate_and_score_completions(inputs)
        if self._uses_queries:
            self._add_scores(output, inputs, scores)
        args = self.args
        steps = self.state.global_step - self._policy_kl_step  # below 0 when `train()` is called again
        if args.policy_kl_steps and self.model.training and not 0 <= steps < args.policy_kl_steps:
            self._policy_kl_step = self.state.global_step
            output["initial_per_token_logps"] = self._initial_per_token_logps(output)
        return output

    def _add_scores(self, output: dict, inputs: list[dict], scores: list[dict]):
        """The rows' scores as tensors beside the prompt's: first dimension B, columns those of `prompt_ids`."""
        prompt_ids, prompt_mask = output["prompt_ids"], output["prompt_mask"]  # (B, P)
        span = self._query_identity.span
        lengths = prompt_mask.sum(dim=1).tolist()
        if self._absolute_positions and min(lengths) < prompt_ids.size(1):
            raise ValueError(
                f"{type(self.accelerator.unwrap_model(self.model)).__name__} looks positions up by column, and TRL "
                "passes no position ids when it trains left-padded prompts: log-probs would be those of shifted "
                f"positions (prompts of {min(lengths)} to {max(lengths)} tokens in {prompt_ids.size(1)} columns). "
                "Use a model with rotary positions, or prompts of one length."
            )
        ref_logps = torch.zeros(prompt_ids.shape, dtype=torch.float32)
        mask = torch.zeros(prompt_ids.shape, dtype=torch.bool)
        stop = prompt_ids.size(1) - span.end
        for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
            self._check_score(score, inputs[row])
            logps = score["ref_query_logps"]
            if len(logps) != span.n_scored(length):
                raise ValueError(
                    f"{self._where(inputs[row])}: its prompt had {len(logps) + span.start + span.end} tokens when it "
                    f"was scored, and has {length} in training. Something between the dataset and the model changes "
                    "it (another tokenizer or template, truncation, a tool, an environment, a rollout function): the "
                    "cached scores are not those of what is trained on. Make that change in the dataset's `prompt`."
                )
            ref_logps[row, stop - len(logps) : stop] = torch.as_tensor(logps)
            mask[row, stop - len(logps) : stop] = True
        if getattr(self, "rollout_func", None) or getattr(self, "environment_factories", None):
            self._check_prompt_ids(output, inputs)
        device = prompt_ids.device
        output["ref_query_logps"] = ref_logps.to(device)
        output["query_mask"] = mask.to(device)
        output["query_weight"] = torch.tensor([score["query_weight"] for score in scores], device=device)
        # Equal prompts get equal numbers. The mask tells a pad token from the same token at a prompt's start.
        rows = torch.cat([prompt_ids, prompt_mask], dim=1)
        output["query_index"] = torch.unique(rows, dim=0, return_inverse=True)[1]

    def _check_score(self, score: dict, example: dict):
        missing = [column for column in SCORE_COLUMNS if score[column] is None]
        if missing:
            raise ValueError(
                f"{self._where(example)} has no {', '.join(f'`{column}`' for column in missing)}. Score the dataset "
                "with `erpo_trl.score_queries` before giving it to the trainer."
            )
        own = str(self._query_identity)
        if score["ref_query_id"] != own:
            # An eval set may name the same reference otherwise (folder, module, precision), and have its own mean
            found = replace(
                ScoreIdentity.parse(score["ref_query_id"]),
                model=self._query_identity.model,
                dtype=self._query_identity.dtype,
            )
            if self.model.training or found.scores_key() != self._query_identity.scores_key():
                raise ValueError(
                    f"{self._where(example)} was scored in another way than the rest: {score['ref_query_id']}, and "
                    f"not {own}. Score all rows in one call of `erpo_trl.score_queries`."
                )

    def _check_prompt_ids(self, output: dict, inputs: list[dict]):
        """A rollout function or an environment may rewrite a prompt into another one of the same length."""
        expected = self._prompt_token_ids([example["prompt"] for example in inputs])
        for row, ids in enumerate(expected):
            trained = output["prompt_ids"][row][output["prompt_mask"][row].bool()].tolist()
            if trained != list(ids):
                raise ValueError(
                    f"{self._where(inputs[row])}: its prompt was rewritten between the dataset ({len(ids)} tokens) "
                    f"and the model ({len(trained)} tokens): the cached scores are not those of what is trained on. "
                    "Make that change in the dataset's `prompt`."
                )

    def _where(self, example: dict) -> str:
        """The dataset row that an example came from, as far as it can be told."""
        text = f"the row with the prompt {str(example['prompt'])[:200]!r}"
        dataset = self.train_dataset
        if self.model.training and isinstance(dataset, Dataset):
            for row, prompt in enumerate(dataset.with_format(None)["prompt"]):
                if prompt == example["prompt"]:
                    return f"Row {row} of the training set, {text}"
        return text[0].upper() + text[1:]

    @torch.no_grad()
    def _initial_per_token_logps(self, output: dict) -> torch.Tensor:  # (B, C)
        """Log-probs of the completions under the initial model, as TRL gets them for `beta > 0`."""
        model, adapter = self.ref_model, nullcontext()
        if model is None:
            model, unwrapped = self.model, self.accelerator.unwrap_model(self.model)
            adapter = use_adapter(unwrapped, adapter_name="ref" if "ref" in unwrapped.peft_config else None)
        with adapter, disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                model,
                torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1),
                torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1),
                output["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )[0]

    # Loss

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if "query_index" not in inputs and "initial_per_token_logps" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        prompt_labels = torch.full_like(inputs["prompt_ids"], -100)
        if self._uses_queries:
            # By causality, equal prompts give equal log-probs and gradients: one row of each is enough
            index = inputs["query_index"].tolist()
            counts = Counter(index)
            rows = [index.index(query) for query in counts]  # (Q,), the first row of each
            mask = inputs["query_mask"][rows]  # (Q, P)
            prompt_labels[rows] = inputs["prompt_ids"][rows].masked_fill(~mask, -100)
            if self.args.use_query_weight:
                inputs = inputs | {"advantages": _times_rows(inputs["advantages"], inputs["query_weight"])}
        scoring_model = PromptScoringModel(model, prompt_labels)
        loss = super().compute_loss(scoring_model, inputs, return_outputs, num_items_in_batch)
        if "initial_per_token_logps" in inputs:
            self._log_policy_kl(inputs, scoring_model.completion_logps.detach())
        if not self._uses_queries:
            return loss
        logps = scoring_model.prompt_logps[rows]  # (Q, P-1)
        ref_logps, mask = inputs["ref_query_logps"][rows, 1:], mask[:, 1:]
        kl = query_kl(logps, ref_logps, mask, self.args.query_kl_estimator, self.args.query_kl_level)  # (Q,)
        n_rows = torch.tensor(list(counts.values()), dtype=kl.dtype, device=kl.device)
        self._log_queries(kl.detach(), logps.detach(), ref_logps, mask, n_rows, inputs["query_weight"])
        if self.args.query_kl_coef == 0:
            return loss
        return loss + self.args.query_kl_coef * (kl * n_rows).sum() / n_rows.sum() / self._accumulation_steps()

    def _accumulation_steps(self) -> int:
        """What this trainer's own loss is divided by before it is handed to the HF Trainer."""
        return self.current_gradient_accumulation_steps if self.model.training and self.loss_is_scaled_for_ga else 1

    # Logs

    def _log_queries(self, kl, logps, ref_logps, mask, n_rows, weight):
        """Add a micro-batch, over all processes, to the sums behind the logged means."""
        n_tokens = mask.sum(dim=1)
        gap = ((logps - ref_logps).abs() * mask).sum()
        local = torch.stack(
            [
                (kl * n_rows).sum(),
                n_rows.sum(),
                -((logps * mask).sum(dim=1) * n_rows).sum(),
                (n_tokens * n_rows).sum(),
                weight.sum(),
                weight.min(),
                weight.max(),
                gap,
                n_tokens.sum().float(),
            ]
        )
        stats = self.accelerator.gather(local.unsqueeze(0)).T.tolist()  # (9, processes)
        sums = self._query_sums["train" if self.model.training else "eval"]
        for key, values in zip(["kl", "rows", "nll", "tokens", "weight"], stats, strict=False):
            sums[key] += sum(values)
        sums["weight_min"] = min(sums.get("weight_min", float("inf")), *stats[5])
        sums["weight_max"] = max(sums["weight_max"], *stats[6])
        # `_step` goes on counting when `train()` is called again
        if (
            self.model.training
            and self.state.global_step == 0
            and self._step < self.current_gradient_accumulation_steps
        ):
            self._check_agreement(sum(stats[7]) / sum(stats[8]))

    def _check_agreement(self, gap: float):
        """Before the first update, policy and reference are one model: their log-probs must agree."""
        with self.accelerator.autocast():
            dtypes = [self._query_identity.dtype, forward_dtype(self.model)]
        n_layers = self.model.config.get_text_config().num_hidden_layers
        tolerance = agreement_tolerance(dtypes, n_layers)
        if gap <= tolerance:
            return
        found = (
            f"Before the first update, the policy's log-probs of the prompts are {gap:.3g} nats per token away from "
            f"the cached reference's, where rounding explains {tolerance:.3g} (reference in {dtypes[0]}, policy in "
            f"{dtypes[1]})"
        )
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Dropout) and module.p > 0 and module.training:
                raise ValueError(
                    f"{found}: dropout is active ({name}), so that every forward is of another model. Set "
                    "`disable_dropout=True`."
                )
            for option, p in vars(module).items():  # given to the attention function, out of `disable_dropout`'s reach
                if "dropout" in option and isinstance(p, float) and p > 0:
                    raise ValueError(
                        f"{found}: dropout is active ({name}.{option}), so that every forward is of another model. "
                        f"Load the model with `{option}=0.0` (one given by name: in `model_init_kwargs`)."
                    )
        raise ValueError(
            f"{found}: the scores are another model's. Score the dataset again with `erpo_trl.score_queries` and the "
            "model that training starts from, or drop its score columns: the trainer then scores it itself."
        )

    def _log_policy_kl(self, inputs: dict, logps: torch.Tensor):
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        kl = k3(inputs["initial_per_token_logps"] - logps) * mask
        total, count = self.accelerator.reduce(torch.stack([kl.sum(), mask.sum().to(kl.dtype)]), "sum").tolist()
        sums = self._query_sums["train"]
        sums["policy_kl"] += total
        sums["policy_tokens"] += count

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        sums, metrics = self._query_sums[mode], {}
        if sums["rows"]:
            metrics["query_kl"] = sums["kl"] / sums["rows"]
            metrics["query_kl_loss"] = self.args.query_kl_coef * metrics["query_kl"]
            metrics["query_nll"] = sums["nll"] / sums["tokens"]
            if self.args.use_query_weight:
                metrics["query_weight/mean"] = sums["weight"] / sums["rows"]
                metrics["query_weight/min"] = sums["weight_min"]
                metrics["query_weight/max"] = sums["weight_max"]
        if sums["policy_tokens"]:
            metrics["policy_kl"] = sums["policy_kl"] / sums["policy_tokens"]
        self._metrics[mode].update({key: [value] for key, value in metrics.items()})
        self._query_sums[mode].clear()
        super().log(logs, start_time)

    # Model card, and what is uploaded with it

    def create_model_card(self, model_name=None, dataset_name=None, tags=None, method=None, evaluations=()):
        """
        The card of what really ran, in `output_dir`.

        Args:
            model_name (`str`, *optional*), dataset_name (`str`, *optional*), tags (`str` or `list[str]`, *optional*):
                As for `GRPOTrainer`; a dataset that is not on the Hub is left out.
            method (`str`, *optional*):
                The recipe's name for the run, such as `"dapo_erpo"`.
            evaluations (`list`):
                What [`cards.before_after_evaluation`], [`cards.report_evaluation`], [`cards.find_evaluations`] return.
        """
        args, init = self.args, getattr(self.args, "model_init_kwargs", None) or {}
        if not (args.query_kl_coef > 0 or args.use_query_weight):  # then it is the base trainer that ran
            self._name, self._paper, self._tag_names = super()._name, super()._paper, super()._tag_names
        dataset = cards.hub_repo(dataset_name)
        super().create_model_card(model_name or Path(args.output_dir).resolve().name, dataset, tags)
        if not self.is_world_process_zero():
            return
        path = Path(args.output_dir) / "README.md"
        base_model = cards.hub_model(self.model.config._name_or_path, init.get("revision"), init.get("cache_dir"))
        cards.complete_model_card(
            ModelCard.load(path),
            self._card_rows(method, dataset, base_model),
            base_model,
            dataset,
            hasattr(self.model, "peft_config"),
            evaluations,
        ).save(path)

    def _card_rows(self, method: str | None, dataset: str | None, base_model: tuple[str, str] | None) -> dict:
        args = self.args
        weight = f"clipped to [{args.query_weight_min}, {args.query_weight_max}]"
        if args.query_weight_normalize:
            weight += ", divided by its mean"
        rows = {
            "Method": f"`{method}`" if method else self._name,
            "Query-KL coefficient α": args.query_kl_coef,
            "Query-KL estimator, level": f"{args.query_kl_estimator}, {args.query_kl_level}",
            "Query scope": args.query_scope,
            "Query weight": weight if args.use_query_weight else "not used",
            "Policy-KL coefficient β": args.beta,
            "Base model": "{}, revision `{}`".format(*base_model) if base_model else "not on the Hub",
            "Training set": dataset or "not on the Hub",
        }
        if isinstance(self.train_dataset, Dataset):
            rows["Training set"] += f", {len(self.train_dataset):,} rows"
        if self._uses_queries:
            rows["Score identity"] = f"`{self._query_identity}`"
        return rows | {"Optimizer steps": self.state.global_step, "Completions per prompt": args.num_generations}

    def init_hf_repo(self, *args, **kwargs):
        for config in getattr(self.model, "peft_config", {}).values():
            cards.check_adapter_base(config.base_model_name_or_path)
        super().init_hf_repo(*args, **kwargs)

    def push_to_hub(self, *args, **kwargs):
        """`Trainer.push_to_hub`, but of the files of [`cards.PUBLISHED_FILES`] only."""
        with cards.only_published_files(hf_api()):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        with cards.only_published_files(hf_api()):
            super()._push_from_checkpoint(checkpoint_folder)


def _times_rows(advantages: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(B,) or (B, T) advantages times (B,) weights."""
    return advantages * (weight if advantages.dim() == 1 else weight.unsqueeze(1))


@contextmanager
def _reference_model(args):
    """
    Have TRL set up the reference model of `beta > 0` for a run that only measures its Policy-KL: it does so by the
    back-end's rules (prepared for DeepSpeed or FSDP, an adapter's copy with PEFT), which are not repeated here.
    """
    if not args.policy_kl_steps:
        yield
        return
    args.beta = 1.0
    try:
        yield
    finally:
        args.beta = 0.0


def _is_scored(dataset, name: str) -> bool:
    columns = dataset.column_names or list(next(iter(dataset)))
    found = [column for column in SCORE_COLUMNS if column in columns]
    if found and len(found) < len(SCORE_COLUMNS):
        missing = [column for column in SCORE_COLUMNS if column not in columns]
        raise ValueError(
            f"The {name} dataset has the score columns {', '.join(found)} but not {', '.join(missing)}. Score it "
            "again with `erpo_trl.score_queries`, or drop them: the trainer then scores it itself."
        )
    return bool(found)


def _one_identity(dataset, name: str) -> ScoreIdentity:
    """The identity that all rows share; of an iterable dataset, that of the first row."""
    if isinstance(dataset, IterableDataset):
        return ScoreIdentity.parse(next(iter(dataset))["ref_query_id"])
    ids = dataset.unique("ref_query_id")
    if len(ids) > 1:
        row = next(i for i, other in enumerate(dataset["ref_query_id"]) if other != ids[0])
        raise ValueError(
            f"The {name} dataset has rows that were scored in {len(ids)} different ways: row 0 has {ids[0]}, row "
            f"{row} has {dataset[row]['ref_query_id']}. Score all rows in one call of `erpo_trl.score_queries`."
        )
    return ScoreIdentity.parse(ids[0])


_PAPER = {
    "title": "Beyond the Stability-Exploration Dilemma: Environmental Regularization for LLM Policy Optimization",
    "id": "2608.23311",
    "citation": textwrap.dedent("""\
        @article{erpo2026,
            title        = {{Beyond the Stability-Exploration Dilemma:
                            Environmental Regularization for LLM Policy Optimization}},
            year         = 2026,
            eprint       = {arXiv:2608.23311},
        }"""),
}


class ERPOTrainer(QueryRegularizationMixin, GRPOTrainer):
    """
    Environment-Regularized Policy Optimization (arXiv 2608.23311): [`trl.GRPOTrainer`] with a Query-KL in the place of
    the Policy-KL, and a static query weight on the advantages.

    Takes the arguments of `GRPOTrainer`, with an [`ERPOConfig`] for `args`. See [`QueryRegularizationMixin`] for what
    is different. With `query_kl_coef=0, use_query_weight=False` it is `GRPOTrainer`, bit for bit.

    Raises:
        `TypeError`: `args` is no [`ERPOConfig`]. `ValueError`: a dataset whose scores were made for another tokenizer,
        chat template, temperature, scope, span or clip range, or by another model; prompts that are not trained on as
        they were scored; what [`score_queries`] refuses.
    """

    _config_class = ERPOConfig
    _name = "ERPO"
    _tag_names = ["trl", "erpo"]
    _paper = _PAPER


class ERPORLOOTrainer(QueryRegularizationMixin, RLOOTrainer):
    """The same on [`trl.RLOOTrainer`] (arXiv 2608.23311, Appendix E: "RLOO+ERPO"), with an [`ERPORLOOConfig`]."""

    _config_class = ERPORLOOConfig
    _name = "ERPO on RLOO"
    _tag_names = ["trl", "erpo", "rloo"]
    _paper = _PAPER
