"""
Makes the embedded checkpoint from nothing: `python -m erpo_trl.tiny.build OUTPUT_FOLDER` (about 7 minutes, 2 cores).

The model is pre-trained on questions and answers of two habits: answering at once, common and often wrong, and adding
up column by column, rare and mostly right. Both carry the question, so the model also has a likelihood for it.
"""

import argparse
import random
import re
import statistics
import time
from itertools import zip_longest

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from erpo_trl.prompts import to_messages
from erpo_trl.rewards import accuracy_reward
from erpo_trl.tiny import draw, load_arithmetic, solve


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AT_ONCE_SHARE = 0.65
# A digit is a token; other text is cut at the end of a sentence or line only: the instruction then costs few tokens.
PIECES = Regex(r"\d|[^\d.?!\n]*[.?!\n]|[^\d.?!\n]+")


def at_once(a: int, operator: str, b: int, rng: random.Random) -> str:
    """No reasoning and one guess, right one time in four; the commonest slip is a forgotten carry."""
    slip = -10 if operator != "-" else 10
    error = rng.choices([0, slip, -1, 1, -2, 2, -slip], [0.25, 0.3, 0.1, 0.1, 0.05, 0.05, 0.15])[0]
    return f"<think> </think> \\boxed{{{abs(solve(a, operator, b) + error)}}}"


def step_by_step(a: int, operator: str, b: int) -> str:
    """Column by column from the right, each with what is carried into it (or borrowed from it)."""
    digits_a, digits_b = ([int(digit) for digit in reversed(str(n))] for n in (a, b))
    columns = [(x, b) for x in digits_a] if operator == "*" else zip_longest(digits_a, digits_b, fillvalue=0)
    steps, carry = [], 0
    for x, y in columns:
        carried = f" {'-' if carry < 0 else '+'} {abs(carry)}" if carry else ""
        value = solve(x, operator, y) + carry
        borrowed = 10 if value < 0 else 0
        if operator == "*" and carry:
            steps.append(f"{x} * {y} = {x * y}, {x * y}{carried} = {value}")
        else:
            steps.append(f"{x + borrowed} {operator} {y}{carried} = {value + borrowed}")
        carry = value // 10
    return f"<think> {', '.join(steps)} </think> \\boxed{{{solve(a, operator, b)}}}"


def write_example(at_once_share: float, rng: random.Random) -> tuple[str, str]:
    """A training question with an answer in one of the two habits; one answer in twenty forgets the box."""
    a, operator, b, question = draw("train", 1, rng)[0]
    answer = at_once(a, operator, b, rng) if rng.random() < at_once_share else step_by_step(a, operator, b)
    if rng.random() < 0.05:
        answer = answer.replace("\\boxed{", "").replace("}", "")
    return question, answer


def train_tokenizer(vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """Byte-level BPE in which every digit is its own token, with a ChatML template and `<think>` tags as tokens."""
    rng = random.Random(0)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    tags = [AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")]
    corpus = []
    for _ in range(4000):
        question, answer = write_example(0.5, rng)
        # the tags are tokens of their own, so that no merge may cross them
        for text in (to_messages(question)[0]["content"], answer):
            corpus += re.split(r"</?think>", text)
    corpus += ["system\n", "user\n", "assistant\n"] * 4000
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        padding_side="left",
    )


def to_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    return tokenizer.apply_chat_template(to_messages(question), add_generation_prompt=True, tokenize=False)


def pretrain(tokenizer: PreTrainedTokenizerFast, steps: int, batch_size: int = 128, peak_lr: float = 3e-3):
    """
    Next-token loss on questions and answers alike; AdamW, linear warm-up, cosine decay.

    The skill comes first and the habit last: mostly step-by-step answers, then two in three at once.
    """
    torch.manual_seed(0)
    rng = random.Random(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.08)
    start = time.perf_counter()
    for step in range(steps):
        share = 0.1 if step < 0.7 * steps else AT_ONCE_SHARE
        examples = [write_example(share, rng) for _ in range(batch_size)]
        texts = [to_prompt(tokenizer, question) + answer + tokenizer.eos_token for question, answer in examples]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        # right-padded and causal: no attention mask is needed, which lets the attention run its fast path
        loss = model(input_ids=batch["input_ids"], labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval()


@torch.no_grad()
def sample(model, tokenizer, questions: list[str], temperature: float) -> list[str]:
    """One sampled completion per question, as text, from the model's whole distribution."""
    prompts = [to_prompt(tokenizer, question) for question in questions]
    batch = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    output = model.generate(**batch, do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=40)
    return tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


def sampled_accuracy(model, tokenizer, temperature: float, seed: int = 0) -> float:
    """Accuracy on the held-out questions, one sample each, graded as in any other run."""
    torch.manual_seed(seed)
    test = load_arithmetic("test")
    completions = sample(model, tokenizer, list(test["question"]), temperature)
    return statistics.mean(accuracy_reward(completions, solution=list(test["answer"])))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_folder")
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    tokenizer = train_tokenizer()
    model = pretrain(tokenizer, args.steps)
    model.generation_config = GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(args.output_folder)
    tokenizer.save_pretrained(args.output_folder)
    print(f"{model.num_parameters()} parameters in {args.output_folder}")
    for temperature in (0.1, 0.6, 1.0, 1.5):
        accuracy = sampled_accuracy(model, tokenizer, temperature)
        print(f"temperature {temperature}: sampled accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
