"""Small random models and a byte-level tokenizer, made on the spot: nothing is downloaded."""

import torch


COMMIT = "0123456789abcdef0123456789abcdef01234567"

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


def make_tokenizer(chat_template=CHAT_TEMPLATE, add_bos=False):
    """One token per byte, and `<s>`, `</s>`, `<pad>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        padding_side="left",
        chat_template=chat_template,
    )


def make_model(kind="llama", seed=0, **kwargs):
    """A causal LM of two layers with logits spread enough that its log-probs tell tokens apart."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config

    torch.manual_seed(seed)
    common = {"vocab_size": 259, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "gpt2":
        config = GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=512,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **common,
            **kwargs,
        )
    else:
        config = {"llama": LlamaConfig, "qwen2": Qwen2Config}[kind](
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            **common,
            **kwargs,
        )
    model = AutoModelForCausalLM.from_config(config)
    return model.float().eval()
