"""Trains a small model with ERPO on whatever back-end launched this, and writes what rank 0 saw to a file."""

import json
import random
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch  # noqa: E402
from helpers import make_tokenizer  # noqa: E402


def fsdp_on_cpu():
    """accelerate turns FSDP on for accelerators only, and silently gives DDP: switch it on for this test."""
    from accelerate import state
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    plain_init = state.AcceleratorState.__init__

    def init(self, *args, **kwargs):
        plain_init(self, *args, **kwargs)
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = kwargs.get("fsdp_plugin") or FullyShardedDataParallelPlugin()

    state.AcceleratorState.__init__ = init


def fixed_completions(trainer):
    """Completions that depend on the step, the prompt and the place in its group, whichever process makes them."""

    def generate(prompt_ids, *args, **kwargs):
        first = trainer.accelerator.process_index * len(prompt_ids)
        completions = []
        for i, ids in enumerate(prompt_ids):
            draw = random.Random(f"{trainer.state.global_step} {ids} {(first + i) % trainer.num_generations}")
            completions.append([*(draw.randrange(3, 259) for _ in range(draw.randint(2, 6))), 2])
        return completions, None

    trainer._generate_single_turn = generate


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 7) for ids in completion_ids]


def main(output: str, backend: str, model: str, options: str):
    if backend == "fsdp2":
        fsdp_on_cpu()
    from datasets import Dataset

    from erpo_trl import ERPOConfig, ERPOTrainer

    options = json.loads(options)
    questions = ["What is 1+1?", "Compute 22*3.", "hi", "Solve x+4=9 now", "7-5", "Is 91 prime?", "2^10 / 4 = ?"]
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions]})
    peft_config = None
    if options.pop("lora", False):
        from peft import LoraConfig

        peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    generate = options.pop("generate", False)
    args = ERPOConfig(
        output_dir=f"{output}.run",
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        num_generations=8,
        max_completion_length=8,
        gradient_accumulation_steps=2,
        max_steps=4,
        logging_steps=1,
        learning_rate=5e-3,
        lr_scheduler_type="constant",
        query_kl_coef=1.0,
        **options,
    )
    trainer = ERPOTrainer(model, reward, args, dataset, processing_class=make_tokenizer(), peft_config=peft_config)
    if not generate:
        fixed_completions(trainer)
    trainer.train()
    parameters = list(trainer.model_wrapped.parameters())
    report = {
        "world": trainer.accelerator.num_processes,
        "fsdp": trainer.is_fsdp_enabled,
        "dtensors": any("DTensor" in type(p).__name__ for p in parameters),
        "zero_stage": trainer.accelerator.state.deepspeed_plugin.zero_stage if trainer.is_deepspeed_enabled else None,
        "partitioned": any(hasattr(p, "ds_tensor") for p in parameters),
        "scores": trainer.train_dataset["ref_query_logp"][:],
        "log": trainer.state.log_history[:-1],
    }
    if trainer.accelerator.is_main_process:
        Path(output).write_text(json.dumps(report))
    # A rank may otherwise abort in gloo's threads as the interpreter exits
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
