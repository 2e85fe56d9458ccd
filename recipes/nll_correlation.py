"""
Are unlikely prompts answered with unlikely responses? (Appendix D, Figure 9)

    python recipes/nll_correlation.py --model Qwen/Qwen2.5-Math-7B --questions math500 --output_dir runs/correlation

Samples one response per question at temperature 1, and writes the NLL of prompt and response (`nll.parquet`), their
correlation with and without the 5 % least likely prompts (`correlation.json`), and the histogram (`nll.png`).
"""

from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from erpo_trl.evaluation.benchmarks import load_benchmark, load_benchmark_file
from erpo_trl.evaluation.correlation import nll_correlation, prompt_response_nlls
from erpo_trl.evaluation.sampling import tokenize_questions
from erpo_trl.evaluation.storage import write_json
from erpo_trl.plotting import plot_nll_correlation


@dataclass
class CorrelationArguments:
    model: str = field(metadata={"help": "Folder or Hub id."})
    questions: str = field(metadata={"help": "A benchmark's name, or a .jsonl file with question and answer."})
    question_column: str = field(default="question", metadata={"help": "In the file."})
    answer_column: str = field(default="answer", metadata={"help": "In the file."})
    data_dir: str | None = field(default=None, metadata={"help": "Folder with local copies of the benchmarks."})
    limit: int | None = field(default=None, metadata={"help": "Only the first so many questions."})
    seed: int = field(default=0, metadata={"help": "Of the sampling."})
    max_new_tokens: int = field(default=3072, metadata={"help": "Completions are cut off there."})
    batch_size: int = field(default=8, metadata={"help": "Sequences at once."})
    dtype: str = field(default="auto", metadata={"help": "Of the weights."})
    output_dir: str = field(default="runs/correlation", metadata={"help": "Where the results go."})


def main(args: CorrelationArguments):
    if args.questions.endswith(".jsonl"):
        benchmark = load_benchmark_file(args.questions, args.question_column, args.answer_column)
    else:
        benchmark = load_benchmark(args.questions, args.data_dir)
    questions = [row["question"] for row in benchmark.rows[: args.limit]]

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype, device_map="auto")
    prompts = tokenize_questions(tokenizer, questions)
    prompt_nll, response_nll = prompt_response_nlls(
        model, tokenizer, prompts, args.seed, args.max_new_tokens, args.batch_size
    )

    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    table = pa.table({"question": questions, "prompt_nll": prompt_nll, "response_nll": response_nll})
    pq.write_table(table, output_dir / "nll.parquet")
    correlations = nll_correlation(prompt_nll, response_nll)
    write_json(output_dir / "correlation.json", correlations)
    print(correlations)
    plot_nll_correlation(prompt_nll, response_nll, correlations, output_dir / "nll.png")


if __name__ == "__main__":
    main(*HfArgumentParser(CorrelationArguments).parse_args_into_dataclasses())
