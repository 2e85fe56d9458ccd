"""
Score the training prompts of a model once, and keep the result: a folder, or a dataset on the Hub.

    python recipes/score_queries.py --model_name_or_path Qwen/Qwen2.5-Math-7B \
        --dataset_name nlile/hendrycks-MATH-benchmark --min_level 3 --max_prompt_length 1024 --save_to scored/math-7b
    accelerate launch recipes/train_math.py --config recipes/configs/qwen2.5-math-7b.yaml --dataset_name scored/math-7b

The data options are those of `train_math.py`. Under `accelerate launch` every process scores its share; with
`--device_map auto` one process spreads a model over all its devices.
"""

import json
from dataclasses import dataclass, field

from accelerate import PartialState
from rich.console import Console
from train_math import RecipeArguments, hub_id, load_training_set, parse
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser

from erpo_trl import score_queries
from erpo_trl.cards import push_scored, scored_dataset_card
from erpo_trl.tiny import MODEL_PATH


@dataclass
class ScoreArguments:
    save_to: str = field(metadata={"help": "The folder to save to, or with --push_to_hub the dataset's Hub id."})
    push_to_hub: bool = field(default=False, metadata={"help": "Whether `save_to` is a Hub id to push to."})
    temperature: float = field(default=1.0, metadata={"help": "The trainer's sampling temperature."})
    query_scope: str = field(default="query", metadata={"help": "'query' or 'prompt'."})
    query_weight_min: float = field(default=0.5, metadata={"help": "Lower clip of the query weight."})
    query_weight_max: float = field(default=2.0, metadata={"help": "Upper clip of the query weight."})
    query_weight_normalize: bool = field(default=False, metadata={"help": "Divide the weights by their mean."})
    chat_template_kwargs: str | None = field(default=None, metadata={"help": "The trainer's, as JSON."})
    device_map: str | None = field(default=None, metadata={"help": "'auto' for a model that one device can't hold."})
    backend: str = field(
        default="transformers",
        metadata={"help": "'vllm' for a model at temperature 1.0.", "choices": ["transformers", "vllm"]},
    )
    tensor_parallel_size: int = field(
        default=1, metadata={"help": "With --backend vllm: GPUs to split the model over."}
    )
    engine_kwargs: str | None = field(
        default=None, metadata={"help": "With --backend vllm: further engine arguments, as JSON."}
    )
    batch_tokens: int = field(default=4096, metadata={"help": "Padded tokens per forward; for vLLM, rather 100000."})

    def __post_init__(self):
        for name in ("chat_template_kwargs", "engine_kwargs"):  # a string on the command line, a mapping in YAML
            if isinstance(getattr(self, name), str):
                setattr(self, name, json.loads(getattr(self, name)))


def main():
    parser = TrlParser((RecipeArguments, ScoreArguments, ModelConfig))
    parser.set_defaults_with_config(model_name_or_path=MODEL_PATH, dtype="float32")
    recipe, args, model_args = parse(parser)
    state = PartialState()
    console = Console(quiet=not state.is_main_process)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, revision=model_args.model_revision)
    with state.main_process_first():
        dataset = load_training_set(recipe, tokenizer, args.chat_template_kwargs, console)
    scored = score_queries(
        dataset,
        model_args.model_name_or_path,
        tokenizer,
        temperature=args.temperature,
        query_scope=args.query_scope,
        weight_min=args.query_weight_min,
        weight_max=args.query_weight_max,
        normalize_weight=args.query_weight_normalize,
        chat_template_kwargs=args.chat_template_kwargs,
        dtype=None if model_args.dtype == "auto" else model_args.dtype,
        revision=model_args.model_revision,
        model_init_kwargs={"device_map": args.device_map} if args.device_map else None,
        batch_tokens=args.batch_tokens,
        backend=args.backend,
        vllm_kwargs={"tensor_parallel_size": args.tensor_parallel_size, "engine_kwargs": args.engine_kwargs},
    )
    if state.is_main_process:
        if args.push_to_hub:
            push_scored(scored, args.save_to, hub_id(recipe.dataset_name))
        else:
            scored.save_to_disk(args.save_to)
            scored_dataset_card(scored, hub_id(recipe.dataset_name)).save(f"{args.save_to}/README.md")
    console.print(f"{len(scored):,} scored prompts are in {args.save_to}: {scored[0]['ref_query_id']}")


if __name__ == "__main__":
    main()
