"""
Memory per GPU and cost of an update, computed from model configs: GRPO with a Policy-KL against ERPO.

    python benchmarks/memory_table.py > docs/memory.md
    python benchmarks/memory_table.py --check    # against measured peaks of a small model on CPU
"""

import argparse
import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml


CONFIGS = Path(__file__).parents[1] / "recipes" / "configs"
TILE = 4096 * 32_768  # of TRL's fused LM head, in logits
HEAD_BYTES = 8  # per element of a projected hidden state: bf16 with gradients in float32 and bf16
MAX_LIVE, BUCKET = 10**9, 5 * 10**8  # DeepSpeed's defaults, in elements


@dataclass(frozen=True)
class Model:
    """The numbers of a Qwen2 config."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    tied: bool

    @property
    def kv(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def layer(self) -> int:
        """Parameters of a block: q, k, v (with bias), o, gate, up, down, two norms."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv + self.hidden + 2 * self.kv
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def head(self) -> int:
        return self.vocab * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside of the blocks: embedding, head, last norm."""
        return self.head * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.root


@dataclass(frozen=True)
class Batch:
    """A micro-batch of the recipe: rows, tokens of prompt and completion, and how many of its prompts differ."""

    rows: int
    prompt: int
    completion: int
    distinct: float

    @classmethod
    def of_recipe(cls, name: str) -> "Batch":
        config = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
        rows, group = config["per_device_train_batch_size"], config["num_generations"]
        distinct = expected_distinct(rows * config["steps_per_generation"], group, rows)
        return cls(rows, config["max_prompt_length"], config["max_completion_length"], distinct)

    @property
    def tokens(self) -> int:
        return self.rows * (self.prompt + self.completion)

    def projected(self, prompts: float = 0) -> float:
        """Tokens that go through the LM head, with this many rows' prompts."""
        return self.rows * self.completion + prompts * self.prompt


MODELS = {
    "Qwen2.5-Math-1.5B": Model(1536, 28, 12, 2, 8960, 151_936, True),
    "Qwen2.5-Math-7B": Model(3584, 28, 28, 4, 18_944, 152_064, False),
    "Qwen2.5-32B": Model(5120, 64, 40, 8, 27_648, 152_064, False),
}
GPUS = {"Qwen2.5-Math-1.5B": 8, "Qwen2.5-Math-7B": 8, "Qwen2.5-32B": 32}
BACKENDS = ["single GPU", "DDP", "FSDP2", "ZeRO-2", "ZeRO-3"]


def expected_distinct(pool: int, group: int, rows: int) -> float:
    """Distinct prompts among `rows` rows drawn from a shuffled rollout of `pool` rows, `group` of each prompt."""
    return pool // group * (1 - math.comb(pool - group, rows) / math.comb(pool, rows))


# Bytes per GPU


def states(n: int, backend: str, gpus: int) -> float:
    """Weights, gradients and AdamW: 16 bytes a parameter in all, and what the back-end keeps besides."""
    if backend == "ZeRO-2":
        return 2 * n + 14 * n / gpus
    return {"single GPU": 16 * n, "DDP": 20 * n}.get(backend, 16 * n / gpus)


def reference(n: int, backend: str, gpus: int) -> float:
    """The reference model: in the dtype of the policy, sharded where the back-end shards weights."""
    return {"FSDP2": 4 * n / gpus, "ZeRO-2": 2 * n, "ZeRO-3": 2 * n / gpus}.get(backend, 4 * n)


def buffers(model: Model, backend: str) -> float:
    """What is gathered or reduced at a time."""
    return {
        "FSDP2": 2 * (model.root + 2 * model.layer) + 2 * model.layer,
        "ZeRO-2": 2 * BUCKET,
        "ZeRO-3": 2 * min(MAX_LIVE, model.parameters) + 2 * BUCKET,
    }.get(backend, 0)


def activations(model: Model, batch: Batch, backend: str, prompts: float = 0) -> float:
    """Checkpoints of all layers, and the greatest of what comes on top of them during the step."""
    autocast = backend in ("single GPU", "DDP")
    stream = 4 if autocast else 2  # bytes of an element of the residual stream
    casts = 2 * model.parameters if autocast else 0
    layer = 2 * (5 * model.hidden + 3 * model.kv + 6 * model.intermediate) + 4 * 4 * model.hidden
    return batch.tokens * model.layers * model.hidden * stream + max(
        casts, batch.tokens * layer, lm_head(model, batch.projected(prompts))
    )


def lm_head(model: Model, tokens: float) -> float:
    """Backward of the fused head: projected rows, a tile, the weight's gradient."""
    return HEAD_BYTES * tokens * model.hidden + 2 * TILE + 4 * model.head


# Cost, in forwards of the policy over an update's tokens


def costs(model: Model, batch: Batch) -> dict[str, float]:
    length = batch.prompt + batch.completion
    block = 2 * model.layer + 2 * length * model.hidden  # FLOPs a token: weights, and half of the attention matrix
    head = 2 * model.head
    forward = batch.tokens * model.layers * block + batch.projected() * head
    added = {name: 4 * n * batch.prompt * head / forward for name, n in (("all", batch.rows), ("one", batch.distinct))}
    return {"GRPO": 5, "GRPO + Policy-KL": 6, "ERPO, every row": 5 + added["all"], "ERPO": 5 + added["one"]}


# The page

INTRO = """\
# Memory and cost of a step

Printed by `python benchmarks/memory_table.py`, from the models' configs and the recipes in `recipes/configs`. GRPO
with a Policy-KL (β > 0) keeps a reference model and runs it over every rollout; ERPO does neither. It projects prompt
tokens through the LM head beside the completions': those of one row per distinct prompt of a micro-batch. What is over
80 GB does not fit the recipes' GPUs.
"""
ASSUMPTIONS = """\
The added tokens' memory is that of the LM head's backward, which is over before the layers' begins: where a recomputed
layer needs more, as in all rows above, it does not raise the peak.

TRL shuffles a rollout before it splits it into micro-batches, so that rows of one prompt are rarely together, and
projecting one row per prompt spares little. Where a micro-batch holds whole groups (`steps_per_generation=1`), it
leaves one row in `num_generations`.

## Assumptions

- n parameters. Float32 master weights, gradients and both AdamW moments: 16 n bytes, sharded over the GPUs by FSDP2
  and ZeRO-3. DDP keeps a second copy of the gradients in its buckets. ZeRO-2 has bf16 weights whole (2 n) and the
  other 14 n sharded.
- Reference model: float32 as the policy is (4 n), sharded under FSDP2. DeepSpeed holds it in bf16: whole under ZeRO-2
  (2 n), sharded under ZeRO-3.
- Compute in bf16. Under autocast (single GPU, DDP) bf16 casts of all weights (2 n) live until the end of a forward,
  and the residual stream is float32.
- Activations under gradient checkpointing: the input of every layer, and on top of them the greatest of: the casts;
  one layer recomputed, with its gradients, and attention without its matrix; the fused LM head's backward (a tile of
  4096 × 32768 logits, the weight's gradient in float32, 8 bytes per element of a projected hidden state).
- Buffers: under FSDP2 embedding, head and two layers gathered in bf16, and a layer's gradients; under ZeRO-3
  `stage3_max_live_parameters` (1e9) in bf16; under ZeRO-2 and ZeRO-3 a bucket of 5e8 gradients in bf16.
- Micro-batch, group size and lengths of the recipe, every row at its longest; the number of distinct prompts in a
  micro-batch is the expected one.
- Not counted: rollouts (vLLM, asleep during the update), fragmentation, the CUDA context, communication.
- Cost: an update's own forward, its recomputation and the backward make 4 forwards; the log-probs of the rollout under
  the old policy, which both methods need with vLLM or several updates per rollout, 1; a reference forward 1. The LM
  head is projected for tokens with a label only; its forward and backward together are 4 projections.

`python benchmarks/memory_table.py --check` compares the formulas for weights, gradients and AdamW, and for the
reference model, with the peak memory of runs of a small model on CPU: they must agree to 15 %.
"""


def table(rows: list[dict]) -> str:
    lines = [list(rows[0]), ["---"] + ["---:"] * (len(rows[0]) - 1)] + [list(row.values()) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"


def memory_rows(name: str) -> list[dict]:
    model, batch = MODELS[name], Batch.of_recipe(name.lower())
    rows = []
    for backend in BACKENDS:
        gpus = 1 if backend == "single GPU" else GPUS[name]
        n = model.parameters
        base = states(n, backend, gpus) + buffers(model, backend)
        ref = reference(n, backend, gpus)
        grpo = base + ref + activations(model, batch, backend)
        erpo = base + activations(model, batch, backend, batch.distinct)
        rows.append(
            {
                f"{name}, GB per GPU": f"{backend}, {gpus} GPU{'s' * (gpus > 1)}",
                "weights, gradients, AdamW": gb(states(n, backend, gpus)),
                "buffers": gb(buffers(model, backend)),
                "activations": gb(activations(model, batch, backend, batch.distinct)),
                "reference": gb(ref),
                "**GRPO + Policy-KL**": gb(grpo),
                "**ERPO**": gb(erpo),
                "saved": f"{1 - erpo / grpo:.0%}",
            }
        )
    return rows


def head_cell(model: Model, tokens: float) -> str:
    return f"{tokens:,.0f} ({HEAD_BYTES * tokens * model.hidden / 1e9:.2f})"


def cost_row(name: str) -> dict:
    model, batch = MODELS[name], Batch.of_recipe(name.lower())
    cost = costs(model, batch)
    return {
        "": f"{name} ({model.parameters / 1e9:.2f}B)",
        "micro-batch": f"{batch.rows} × ({batch.prompt:,} + {batch.completion:,})",
        "distinct prompts": f"{batch.distinct:.1f}",
        "added head tokens (GB): every row": head_cell(model, batch.rows * batch.prompt),
        "one row per prompt": head_cell(model, batch.distinct * batch.prompt),
        **{key: f"{value:.2f}" for key, value in cost.items()},
        "ERPO / GRPO + Policy-KL": f"{cost['ERPO'] / cost['GRPO + Policy-KL']:.2f}",
    }


def page() -> str:
    memory = [table(memory_rows(name)) for name in MODELS]
    cost = table([cost_row(name) for name in MODELS])
    return "\n".join(
        [INTRO, "## Memory\n", *memory, "## Cost of an update, in forwards of the policy\n", cost, ASSUMPTIONS]
    )


# The check

SMALL = Model(512, 8, 8, 8, 1408, 4096, True)
SMALLER = Model(512, 1, 8, 8, 1408, 4096, True)
RUNS = {"GRPO": (SMALL, 0.0), "GRPO + Policy-KL": (SMALL, 0.04), "ERPO": (SMALL, None), "smaller": (SMALLER, None)}


def train_small(model: Model, beta: float | None) -> int:
    """Peak bytes of this process while it trains: GRPO with this β, or ERPO if it is `None`. One step of two rows."""
    from _common import _resident, make_prompts, quiet_folder
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from erpo_trl import ERPOConfig, ERPOTrainer

    config = Qwen2Config(
        vocab_size=model.vocab,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        tie_word_embeddings=model.tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(model.vocab)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", eos_token="w1", padding_side="left")
    prompts = make_prompts([8, 9, 10, 11], 2, argparse.Namespace(seed=0, vocab_size=model.vocab))
    with quiet_folder() as folder:
        os.environ["ERPO_TRL_CACHE"] = f"{folder}/scores"
        Qwen2ForCausalLM(config).save_pretrained(f"{folder}/model")
        trainer_class, config_class = (ERPOTrainer, ERPOConfig) if beta is None else (GRPOTrainer, GRPOConfig)
        args = config_class(
            output_dir=folder,
            beta=beta or 0.0,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=4,
            max_steps=2,
            save_strategy="no",
            report_to=[],
        )
        trainer = trainer_class(
            f"{folder}/model",
            lambda completions, **kwargs: [float(len(c)) for c in completions],
            args,
            Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
        )
        trainer.train()
    return _resident("VmHWM")


def check() -> list[dict]:
    """Predicted and measured differences between the runs' peaks, in bytes."""
    peaks = {}
    for name in RUNS:
        # Freed tensors go back to the system at once, so that the peak is that of what is alive
        env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
        run = subprocess.run(
            [sys.executable, __file__, "--run", name], env=env, capture_output=True, text=True, check=False
        )
        if run.returncode:
            raise RuntimeError(f"The run {name!r} failed:\n{run.stderr[-4000:]}")
        peaks[name] = json.loads(run.stdout.splitlines()[-1])
    n, m = SMALL.parameters, SMALLER.parameters
    differences = {
        "reference model: GRPO + Policy-KL less GRPO": (reference(n, "single GPU", 1), "GRPO + Policy-KL", "GRPO"),
        "reference model: GRPO + Policy-KL less ERPO": (reference(n, "single GPU", 1), "GRPO + Policy-KL", "ERPO"),
        f"states: ERPO less ERPO with {n - m:,} fewer parameters": (states(n - m, "single GPU", 1), "ERPO", "smaller"),
    }
    return [
        {"difference": name, "predicted": predicted, "measured": peaks[more] - peaks[less]}
        for name, (predicted, more, less) in differences.items()
    ]


def main(argv: list[str] | None = None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="compare with measured peaks on CPU (Linux)")
    parser.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.run:
        with contextlib.redirect_stdout(io.StringIO()):
            peak = train_small(*RUNS[args.run])
        print(json.dumps(peak))
    elif args.check:
        rows = check()
        print(f"{SMALL.parameters:,} parameters")
        for row in rows:
            ratio = row["measured"] / row["predicted"]
            print(
                f"{row['difference']}: predicted {row['predicted'] / 1e6:.0f} MB, measured "
                f"{row['measured'] / 1e6:.0f} MB ({ratio:.2f})"
            )
        if any(abs(row["measured"] / row["predicted"] - 1) > 0.15 for row in rows):
            sys.exit("Predicted and measured memory differ by more than 15 %.")
    else:
        print(page(), end="")


if __name__ == "__main__":
    main()
