"""Tiny models and a byte tokenizer, shared by the tests of serve, evals, dist and cli."""

import codecs
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from smalti.config.model import ModelConfig, MoEConfig
from smalti.data.tokens.writer import TokenWriter
from smalti.model.decoder import Decoder, DecoderOutput
from smalti.model.init import init_weights


class ByteTokenizer:
    """One token for each byte, 256 for the end of a document."""

    vocab_size = 257
    eod_id = 256
    unused_ids = frozenset[int]()
    digest = "b" * 64
    template_ids = ()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", "replace")

    def decode_stream(self) -> "ByteStream":
        return ByteStream()


class ByteStream:
    """What ``Tokenizer.decode_stream`` gives, for bytes."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(bytes([token]) if token < 256 else b"")

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


def llama_config(vocab_size: int = 257, context: int = 64) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
    )


def dbrx_config(vocab_size: int = 257, context: int = 64) -> ModelConfig:
    return family_config("dbrx", vocab_size, context)


_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"head_dim": 12, "sliding_window": 8},
    "qwen3": {"qk_norm": "head", "sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")},
    "olmo2": {"qk_norm": "full", "norm_placement": "post"},
    "mpt": {
        "norm": "layernorm",
        "position": "alibi",
        "gated": False,
        "activation": "gelu",
        "intermediate_size": 128,
        "num_key_value_heads": None,
        "tie_word_embeddings": True,
        "clip_qkv": 4.0,
    },
    "dbrx": {"norm": "layernorm", "clip_qkv": 8.0},
    "mixtral": {"sliding_window": 8},
    "olmoe": {"qk_norm": "full"},
    "qwen3_moe": {"qk_norm": "head"},
}


def family_config(family: str, vocab_size: int = 257, context: int = 64) -> ModelConfig:
    """A tiny model of any family, with what is its own."""
    fields = llama_config(vocab_size, context).model_dump() | {"family": family} | _FAMILIES[family]
    if family in ("dbrx", "mixtral", "olmoe", "qwen3_moe"):
        fields |= {"intermediate_size": 32, "moe": MoEConfig(num_experts=4, num_experts_per_tok=2)}
    return ModelConfig(**fields)


def tiny_model(config: ModelConfig, seed: int = 3) -> Decoder:
    model = Decoder(config)
    init_weights(model, config, seed)
    return model.eval()


class UniformModel(nn.Module):
    """Gives every token the same probability, 1 / vocab_size."""

    def __init__(self, vocab_size: int = 257, context: int = 64) -> None:
        super().__init__()
        self.config = llama_config(vocab_size, context)
        self.weight = nn.Parameter(torch.zeros(vocab_size, 4))

    def forward(self, ids_BT: Tensor, positions_BT=None, documents_BT=None, *, head) -> DecoderOutput:
        return DecoderOutput(head(torch.zeros(*ids_BT.shape, 4), self.weight), None)


def write_byte_tokens(folder: Path, texts: list[str]) -> str:
    """Token files of the byte tokenizer."""
    tokenizer = ByteTokenizer()
    with TokenWriter(folder, vocab_size=257, eod_id=256, tokenizer_digest=tokenizer.digest) as writer:
        for text in texts:
            writer.add(np.array(tokenizer.encode(text), dtype=np.int64), len(text.encode()))
    return str(folder)
