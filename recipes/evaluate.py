"""
Evaluation as in the paper's section 5: benchmarks × temperatures × k samples, with a report.

    python recipes/evaluate.py --model Qwen/Qwen2.5-Math-7B --benchmarks all --temperatures 0.1 0.6 1.0 1.5 --k 32

What is finished in `output_dir` is not sampled again. Other uses:

    --checkpoints runs/erpo                     every checkpoint-<step> of a run, for Figure 5 and Tables 4 and 5
    --compare Base=runs/a ERPO=runs/b           no sampling: several finished evaluations side by side
    --backend vllm, --backend openai --base_url http://127.0.0.1:8000/v1
    --benchmark mine.jsonl                      your own questions (columns question, answer)
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from erpo_trl.evaluation.benchmarks import SOURCES, load_benchmark, load_benchmark_file
from erpo_trl.evaluation.report import load_evaluation, write_report
from erpo_trl.evaluation.runner import run_evaluation
from erpo_trl.evaluation.sampling import OpenAISampler, TransformersSampler, VLLMSampler
from erpo_trl.evaluation.storage import model_identity
from erpo_trl.plotting import require_matplotlib


@dataclass
class EvaluationArguments:
    model: str | None = field(default=None, metadata={"help": "Folder or Hub id of the model."})
    checkpoints: str | None = field(
        default=None,
        metadata={"help": "Instead of --model: a run folder; every checkpoint-<step> in it is evaluated."},
    )
    compare: list[str] = field(
        default_factory=list, metadata={"help": "Instead of sampling: output folders to report on, as [name=]folder."}
    )
    benchmarks: list[str] = field(
        default_factory=list,
        metadata={"help": f"Of {', '.join(SOURCES)} (together: all), arithmetic."},
    )
    benchmark: list[str] = field(default_factory=list, metadata={"help": "JSON-lines files of your own."})
    question_column: str = field(default="question", metadata={"help": "In the files of --benchmark."})
    answer_column: str = field(default="answer", metadata={"help": "In the files of --benchmark."})
    data_dir: str | None = field(
        default=None, metadata={"help": "Folder with local copies of the benchmarks, <name>/ or <name>.jsonl."}
    )
    limit: int | None = field(default=None, metadata={"help": "Only the first so many questions of each benchmark."})
    temperatures: list[float] = field(
        default_factory=lambda: [0.1, 0.6, 1.0, 1.5], metadata={"help": "0 is greedy decoding, one sample."}
    )
    k: int = field(default=32, metadata={"help": "Samples per question."})
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    max_new_tokens: int = field(default=3072, metadata={"help": "Completions are cut off there."})
    chat_template_kwargs: str = field(default="{}", metadata={"help": "JSON, for apply_chat_template."})
    backend: str = field(
        default="transformers",
        metadata={"help": "What samples.", "choices": ["transformers", "vllm", "openai"]},
    )
    batch_size: int = field(default=64, metadata={"help": "Completions at once (transformers)."})
    dtype: str = field(
        default="auto",
        metadata={"help": "Of the weights (transformers, vllm). auto: the checkpoint's, but vllm halves float32."},
    )
    tensor_parallel_size: int = field(default=1, metadata={"help": "GPUs to split the model over (vllm)."})
    engine_kwargs: str = field(default="{}", metadata={"help": "JSON, for vllm.LLM."})
    base_url: str | None = field(default=None, metadata={"help": "Of an OpenAI-compatible server (openai)."})
    served_name: str | None = field(default=None, metadata={"help": "The model's name there, if not --model."})
    extra_body: str | None = field(
        default=None, metadata={"help": "JSON, request fields beyond OpenAI's own; '{}' for a strict server."}
    )
    output_dir: str | None = field(default=None, metadata={"help": "Default: runs/evaluation/<name of the model>."})
    overwrite: bool = field(default=False, metadata={"help": "Sample again what is there."})
    no_figures: bool = field(default=False, metadata={"help": "Report without figures (they need matplotlib)."})

    def __post_init__(self):
        if sum(map(bool, (self.model, self.checkpoints, self.compare))) != 1:
            raise ValueError("Give one of --model, --checkpoints and --compare.")
        if self.compare and not self.output_dir:
            raise ValueError("--compare needs an --output_dir for the report.")
        if not self.compare and not self.benchmarks + self.benchmark:
            raise ValueError(f"Give --benchmarks (all, {', '.join(SOURCES)}, arithmetic) or --benchmark file.jsonl.")
        if (self.backend == "openai") != (self.base_url is not None):
            raise ValueError("--backend openai and --base_url go together.")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, got {self.limit}.")
        if self.k < 1 or not self.temperatures or min(self.temperatures) < 0:
            raise ValueError(f"Need k >= 1 and temperatures >= 0, got k = {self.k}, {self.temperatures}.")
        if not self.no_figures:
            require_matplotlib()  # not found out after hours of sampling


def load_benchmarks(args: EvaluationArguments):
    names = [name for given in args.benchmarks for name in (SOURCES if given == "all" else [given])]
    benchmarks = [load_benchmark(name, args.data_dir) for name in dict.fromkeys(names)]
    benchmarks += [load_benchmark_file(path, args.question_column, args.answer_column) for path in args.benchmark]
    for benchmark in benchmarks:
        print(
            f"{benchmark.name}: {len(benchmark.rows)} questions ({benchmark.repeated} of them repeated), "
            f"{benchmark.without_gold} without an answer left out"
        )
        if args.limit is not None:
            del benchmark.rows[args.limit :]
    return benchmarks


def make_sampler(args: EvaluationArguments, model: str, tokenizer):
    if args.backend == "vllm":
        engine = {
            "dtype": args.dtype,
            "tensor_parallel_size": args.tensor_parallel_size,
            **json.loads(args.engine_kwargs),
        }
        return VLLMSampler(model, tokenizer, **engine)
    if args.backend == "openai":
        extra_body = None if args.extra_body is None else json.loads(args.extra_body)
        return OpenAISampler(args.base_url, model, tokenizer, args.served_name, extra_body)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=args.dtype, device_map="auto")
    return TransformersSampler(loaded, tokenizer, args.batch_size)


def main(args: EvaluationArguments):
    # 1. Finished evaluations side by side
    if args.compare:
        named = [item.split("=", 1) if "=" in item else (None, item) for item in args.compare]
        evaluations = [load_evaluation(folder, name) for name, folder in named]
        Console().print(Markdown(write_report(evaluations, args.output_dir, not args.no_figures)))
        return

    # 2. What to evaluate, on what
    source = Path(args.model or args.checkpoints)
    output_dir = Path(args.output_dir or Path("runs/evaluation") / source.name)
    models = {output_dir: args.model}
    if args.checkpoints:
        folders = sorted(source.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[-1]))
        models = {output_dir / path.name: str(path) for path in folders}
        if not models:
            raise FileNotFoundError(f"No checkpoint-<step> in {source}; train with save_strategy 'steps'.")
    benchmarks = load_benchmarks(args)

    # 3. Sample, grade, report
    for folder, model in models.items():
        tokenizer = AutoTokenizer.from_pretrained(model)
        settings = {
            "model": model,
            "files": model_identity(model),
            "backend": args.backend,
            "tensor_parallel_size": args.tensor_parallel_size,
            "dtype": args.dtype,
        }
        run_evaluation(
            lambda model=model, tokenizer=tokenizer: make_sampler(args, model, tokenizer),
            tokenizer,
            benchmarks,
            args.temperatures,
            args.k,
            folder,
            settings,
            args.seed,
            args.max_new_tokens,
            args.overwrite,
            json.loads(args.chat_template_kwargs),
        )
        Console().print(Markdown(write_report([load_evaluation(folder)], folder, not args.no_figures)))
        print(f"Report and samples are in {folder}.")


if __name__ == "__main__":
    main(*HfArgumentParser(EvaluationArguments).parse_args_into_dataclasses())
