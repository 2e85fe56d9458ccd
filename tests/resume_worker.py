"""Trains a small model with checkpoints, and kills itself in the middle if told so."""

import json
import os
import signal
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from helpers import make_tokenizer  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from erpo_trl import ERPOConfig, ERPOTrainer  # noqa: E402


def reward(completions, **kwargs):
    return [float(sum(map(ord, c[0]["content"])) % 7) for c in completions]


def main(method: str, folder: str, name: str, kill_at: int, resume: bool, options: dict):
    trainer_class, config_class = (ERPOTrainer, ERPOConfig) if method == "erpo" else (GRPOTrainer, GRPOConfig)
    args = config_class(
        output_dir=f"{folder}/{name}",
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_generations=2,
        max_completion_length=6,
        max_steps=6,
        save_steps=1,
        logging_steps=1,
        learning_rate=5e-3,
        gradient_checkpointing=False,
        **options,
    )
    questions = ["What is 1+1?", "Compute 22*3.", "hi", "Solve x+4=9 now", "7-5", "Is 91 prime?", "2^10 / 4 = ?"]
    dataset = Dataset.from_dict({"prompt": [[{"role": "user", "content": q}] for q in questions * 2]})
    trainer = trainer_class(f"{folder}/model", reward, args, dataset, processing_class=make_tokenizer())
    micro_steps = 0
    compute_loss = trainer.compute_loss

    def counting(*inputs, **kwargs):
        nonlocal micro_steps
        micro_steps += 1
        if micro_steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return compute_loss(*inputs, **kwargs)

    trainer.compute_loss = counting
    trainer.train(resume_from_checkpoint=resume or None)
    torch.save(trainer.model.state_dict(), f"{folder}/{name}.pt")
    report = {
        "log": trainer.state.log_history,
        "scores": trainer.train_dataset["ref_query_logp"][:] if method == "erpo" else None,
        "micro_steps": micro_steps,
    }
    Path(f"{folder}/{name}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    method, folder, name, kill_at, resume, options = sys.argv[1:]
    main(method, folder, name, int(kill_at), resume == "resume", json.loads(options))
