"""Token embedding.

Shapes: B batch, T time, D hidden, V vocabulary.
"""

from torch import nn

from smalti.config.model import ModelConfig


def build_embed(config: ModelConfig) -> nn.Embedding:
    """Table [V, D]; a lookup of ids [B, T] gives [B, T, D]. Unscaled, without a padding row."""
    return nn.Embedding(config.vocab_size, config.hidden_size)


def build_lm_head(config: ModelConfig) -> nn.Linear | None:
    """Output head [V, D] without bias, or None when the embedding serves as one."""
    if config.tie_word_embeddings:
        return None
    return nn.Linear(config.hidden_size, config.vocab_size, bias=False)
