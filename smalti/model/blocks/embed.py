"""Token embedding.

Shapes: B batch, T time, D hidden, V vocabulary.
"""

from torch import nn

from smalti.config.model import ModelConfig

SCORES = "score.weight"
"""The parameter of a reward model that no language model has."""


def build_embed(config: ModelConfig) -> nn.Embedding:
    """Build the table [V, D], which maps ids [B, T] to [B, T, D]; not scaled, without a padding row."""
    return nn.Embedding(config.vocab_size, config.hidden_size)


def build_lm_head(config: ModelConfig) -> nn.Linear | None:
    """Build the output head [V, D] without bias; None if it is tied to the embedding, or for a reward model."""
    if config.tie_word_embeddings or config.num_labels:
        return None
    return nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def build_score(config: ModelConfig) -> nn.Linear | None:
    """Build the scores [1, D] of a reward model, without bias; None for a language model."""
    return nn.Linear(config.hidden_size, config.num_labels, bias=False) if config.num_labels else None
