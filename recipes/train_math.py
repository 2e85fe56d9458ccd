"""
Train a model on questions with checkable answers, by ERPO or any other method of the paper's tables.

    accelerate launch recipes/train_math.py --config recipes/configs/tiny.yaml
    accelerate launch recipes/train_math.py --config recipes/configs/qwen2.5-math-7b.yaml --method grpo

Options come from the method (`erpo_trl/methods.py`), over it the YAML file, over that the command line. A run that was
killed goes on from its last checkpoint in `output_dir`; `--resume_from_checkpoint false` starts over.
"""

import difflib
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config
from trl.rewards import get_soft_overlong_punishment

from erpo_trl import ERPOConfig, ERPORLOOConfig, ERPORLOOTrainer, ERPOTrainer
from erpo_trl.cards import before_after_evaluation, hub_repo
from erpo_trl.evaluation import evaluate_model
from erpo_trl.evaluation.benchmarks import load_benchmark
from erpo_trl.evaluation.storage import write_text
from erpo_trl.methods import METHODS, check_on_policy, get_method, method_name
from erpo_trl.prompts import MATH500_DATASET, MATH_DATASET, load_prompts, load_questions, prepare_rows
from erpo_trl.rewards import accuracy_reward, format_reward
from erpo_trl.tiny import MODEL_PATH, load_arithmetic


@dataclass
class RecipeArguments:
    """What the recipe itself asks for; everything else is the trainer's or the model's."""

    method: str = field(default="erpo", metadata={"help": f"One of: {', '.join(METHODS)}."})
    dataset_name: str = field(
        default="arithmetic",
        metadata={"help": "A Hub id, a folder, a .jsonl/.json/.csv/.parquet file, or 'arithmetic' (embedded)."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "The dataset's configuration, if it has some."})
    dataset_train_split: str = field(default="train", metadata={"help": "The split to train on."})
    question_column: str | None = field(default=None, metadata={"help": "The column with the question."})
    answer_column: str | None = field(default=None, metadata={"help": "The column with the answer."})
    min_level: int = field(default=0, metadata={"help": "Keep rows whose `level` is at least this; 0 keeps all."})
    max_prompt_length: int | None = field(default=None, metadata={"help": "Drop prompts of more tokens than this."})
    held_out: list[str] | None = field(
        default=None,
        metadata={"help": "Datasets whose questions must not be trained on. For MATH, MATH500 unless given."},
    )
    eval_benchmark: str | None = field(
        default=None,
        metadata={"help": "Benchmark of the before/after table; 'arithmetic' for the embedded questions."},
    )
    eval_questions: int = field(default=100, metadata={"help": "Questions of it; 0 for no table."})
    eval_samples: int = field(default=4, metadata={"help": "Samples per question and temperature."})


def main():
    # 1. The options: method < YAML < command line
    method = get_method(method_name(sys.argv[1:]))
    trainer_class, config_class = {
        "grpo": (ERPOTrainer, ERPOConfig),
        "rloo": (ERPORLOOTrainer, ERPORLOOConfig),
    }[method.trainer]
    parser = TrlParser((RecipeArguments, config_class, ModelConfig))
    parser.set_defaults_with_config(model_name_or_path=MODEL_PATH, **method.options)
    recipe, args, model_args = parse(parser)
    if method.on_policy:
        check_on_policy(recipe.method, args)
    console = Console(quiet=args.process_index != 0)
    effective = {name: getattr(args, name) for name in method.options}
    console.print(f"[bold]{recipe.method}[/bold]:", ", ".join(f"{k}={v}" for k, v in effective.items()))
    name = model_args.model_name_or_path
    if not os.path.isdir(name) and hub_repo(name) is None:
        raise FileNotFoundError(
            f"There is no folder {name!r}, and it is no Hub id. Type --model_name_or_path <a folder or a Hub id>."
        )
    run = {"method": recipe.method, "model_name_or_path": name, "dataset_name": recipe.dataset_name}
    checkpoint = last_checkpoint(args, run)
    if checkpoint:
        done = json.loads((checkpoint / "trainer_state.json").read_text())["global_step"]
        console.print(f"Going on from {checkpoint}; --resume_from_checkpoint false starts over.")
        if 0 < args.max_steps <= done and (Path(args.output_dir) / "trainer_state.json").is_file():
            console.print(f"All {args.max_steps} steps of this run are done: there is nothing to train.")
            return
    if args.process_index == 0:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        write_text(Path(args.output_dir) / "run.json", json.dumps(run))

    # 2. The data: questions under the paper's prompt, with their gold answers
    tokenizer = AutoTokenizer.from_pretrained(
        model_args.model_name_or_path, revision=model_args.model_revision, padding_side="left"
    )
    with args.main_process_first(desc="loading the data"):
        dataset = load_training_set(recipe, tokenizer, args.chat_template_kwargs, console)

    # 3. The rewards: 0.9 accuracy and 0.1 format
    reward_funcs, weights = [accuracy_reward, format_reward], [0.9, 0.1]
    if method.soft_overlong_punishment:
        reward_funcs.append(get_soft_overlong_punishment(args.max_completion_length, args.max_completion_length // 5))
        weights.append(1.0)
    if args.reward_weights is None:
        args.reward_weights = weights

    # 4. The trainer: scores the prompts under the initial policy, unless they come scored
    args.model_init_kwargs = (args.model_init_kwargs or {}) | {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    trainer = trainer_class(
        model_args.model_name_or_path,
        reward_funcs,
        args,
        dataset,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )

    # 5. Before, train, after
    output_dir = Path(args.output_dir)
    before = evaluate(trainer, recipe, args, console)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    after = evaluate(trainer, recipe, args, console)

    # 6. Save: the model with its card, the log, a figure, the table; publish
    trainer.save_model()
    trainer.save_state()
    about = {"dataset_name": hub_id(recipe.dataset_name), "method": recipe.method, "evaluations": []}
    if trainer.is_world_process_zero():
        plot(trainer.state.log_history, output_dir / "training.png", console)
    if before:
        results = {"benchmark": recipe.eval_benchmark or "arithmetic", "before": before, "after": after}
        show(before, after, results["benchmark"], console)
        about["evaluations"] = [before_after_evaluation(results)]
        if trainer.is_world_process_zero():
            write_text(output_dir / "before_after.json", json.dumps(results, indent=1))
    trainer.create_model_card(model_name=output_dir.name, **about)
    console.print(f"The model, its log and its figures are in {output_dir}.")
    if args.push_to_hub:
        trainer.push_to_hub(**about)


def parse(parser) -> list:
    """The parsed options; a mistyped one, in the file or on the command line, is refused with the nearest there is."""
    *parsed, unknown = parser.parse_args_and_config(return_remaining_strings=True)
    for option in unknown:
        if option.startswith("--"):
            near = difflib.get_close_matches(option, parser._option_string_actions, n=1)
            raise ValueError(f"Unknown option {option}. {f'Did you mean {near[0]}?' if near else 'See --help.'}")
    if unknown:
        raise ValueError(f"These values belong to no option: {' '.join(unknown)}.")
    return parsed


def load_training_set(recipe, tokenizer, chat_template_kwargs, console):
    """The dataset that the recipe names, as trainer rows; one printed line per filter."""
    options = {
        "question_column": recipe.question_column,
        "answer_column": recipe.answer_column,
        "tokenizer": tokenizer,
        "max_prompt_length": recipe.max_prompt_length,
        "chat_template_kwargs": chat_template_kwargs,
    }
    if recipe.dataset_name == "arithmetic":
        dataset, reports = prepare_rows(load_arithmetic("train"), **options)
    else:
        held_out = recipe.held_out or ([MATH500_DATASET] if recipe.dataset_name == MATH_DATASET else [])
        dataset, reports = load_prompts(
            recipe.dataset_name,
            recipe.dataset_train_split,
            recipe.dataset_config,
            min_level=recipe.min_level,
            held_out={name: load_questions(name) for name in held_out},
            **options,
        )
    for report in reports:
        console.print(str(report))
    return dataset


def last_checkpoint(args, run: dict) -> Path | None:
    """
    The newest whole checkpoint in `output_dir`, or what `--resume_from_checkpoint` says.

    `run.json` says whose run it is: another method, model or dataset does not go on from it.
    """
    wanted = str(args.resume_from_checkpoint or "true").lower()
    if wanted not in ("true", "false"):
        return Path(args.resume_from_checkpoint)
    output_dir = Path(args.output_dir)
    steps = {int(path.name.rpartition("-")[2]): path for path in output_dir.glob("checkpoint-*[0-9]")}
    # `trainer_state.json` is written last: a checkpoint without it was cut off
    whole = [step for step, path in steps.items() if (path / "trainer_state.json").is_file()]
    if not whole or wanted == "false":
        return None
    earlier = json.loads((output_dir / "run.json").read_text()) if (output_dir / "run.json").is_file() else run
    for option, value in run.items():
        if earlier[option] != value:
            raise ValueError(
                f"{output_dir} holds a run with --{option} {earlier[option]}, and this one has {value}. Type another "
                "--output_dir, or --resume_from_checkpoint false to start over in this one."
            )
    return steps[max(whole)]


def evaluate(trainer, recipe, args, console) -> list[dict] | None:
    """Accuracy of the policy as it is, at four temperatures, on the first questions of the benchmark."""
    benchmark = recipe.eval_benchmark or ("arithmetic" if recipe.dataset_name == "arithmetic" else None)
    if not benchmark or not recipe.eval_questions:
        return None
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        console.print("A sharded model is evaluated by recipes/evaluate.py, from its folder: no table here.")
        return None
    if not trainer.is_world_process_zero():
        return None
    rows = load_benchmark(benchmark).rows[: recipe.eval_questions]
    return evaluate_model(
        trainer.accelerator.unwrap_model(trainer.model),
        trainer.processing_class,
        rows,
        k=recipe.eval_samples,
        seed=args.seed,
        max_new_tokens=args.max_completion_length,
        chat_template_kwargs=args.chat_template_kwargs,
    )


def show(before: list[dict], after: list[dict], benchmark: str, console):
    k = before[-1]["k"]
    table = Table(title=f"{benchmark}: {before[0]['questions']} questions, {k} samples each")
    for column in ("temperature", f"avg@{k} before", f"avg@{k} after", f"pass@{k} before", f"pass@{k} after"):
        table.add_column(column, justify="right")
    for old, new in zip(before, after, strict=True):
        numbers = [old["avg@k"], new["avg@k"], old["pass@k"], new["pass@k"]]
        table.add_row(f"{old['temperature']:g}", *(f"{number:.3f}" for number in numbers))
    console.print(table)


def plot(log_history: list[dict], path: Path, console):
    try:
        from erpo_trl.plotting import plot_training

        plot_training(log_history, path)
    except ImportError as error:
        console.print(f"No figure: {error}")


def hub_id(dataset_name: str) -> str | None:
    """The dataset's name for the model card; a path on this machine is nobody else's business."""
    return None if dataset_name == "arithmetic" or os.path.exists(dataset_name) else dataset_name


if __name__ == "__main__":
    main()
