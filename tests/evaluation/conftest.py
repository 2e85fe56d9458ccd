"""A language model whose distribution is known: the next token depends on the last one alone, through a table."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutput


VOCAB = ["<unk>", "<eos>", "<end>", "a", "b", "c", "d", "<think>", "</think>", "\\boxed{4}", "\\boxed{5}"]
UNK, EOS, END, A, B, C, D, THINK, THOUGHT, BOX4, BOX5 = range(len(VOCAB))


class BigramConfig(PretrainedConfig):
    model_type = "bigram"

    def __init__(self, max_position_embeddings=512, **kwargs):
        super().__init__(**kwargs)
        self.max_position_embeddings = max_position_embeddings


class Bigram(PreTrainedModel, GenerationMixin):
    config_class = BigramConfig

    def __init__(self, table):
        super().__init__(BigramConfig())
        self.table = nn.Parameter(table)  # (V, V) logits of the next token given the last
        self.dropout = nn.Dropout(0.5)
        self.batches = []
        self.generation_config = GenerationConfig(eos_token_id=[EOS, END], use_cache=False)

    def forward(self, input_ids, attention_mask=None, **kwargs):
        self.batches.append(tuple(input_ids.shape))
        return CausalLMOutput(logits=self.table[input_ids] + 0 * self.dropout(self.table[input_ids]))

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return {"input_ids": input_ids}


@pytest.fixture
def make_bigram():
    def make(transitions: dict[int, dict[int, float]]) -> Bigram:
        """`{last: {next: probability}}`; a last token not listed is followed by <eos>."""
        table = torch.full((len(VOCAB), len(VOCAB)), -1e4)
        table[:, EOS] = 0.0
        for last, following in transitions.items():
            table[last] = -1e4
            for token, probability in following.items():
                table[last, token] = torch.tensor(probability).log()
        return Bigram(table)

    return make


@pytest.fixture
def tokenizer():
    """One token per word of `VOCAB`, other words unknown; no chat template, no pad token."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCAB)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
