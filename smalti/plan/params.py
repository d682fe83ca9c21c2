"""How many parameters a model has, by arithmetic on its config alone.

Promises: ``count`` equals what ``smalti.model.decoder.Decoder`` registers, parameter for parameter (a test compares
them on the meta device). Does not know about ranks, dtypes or optimizers.
"""

from dataclasses import dataclass

from smalti.config.model import ModelConfig


@dataclass(frozen=True)
class Params:
    """Parameter counts of one model; every field is a number of scalars."""

    total: int
    """All parameters; a tied output head is counted once."""
    active: int
    """Parameters that one token meets: all but the experts that it is not sent to. Embedding and head included."""
    embedding: int
    """Rows x width of the input embedding."""
    head: int
    """The output head; 0 when it is the embedding."""
    attention: int
    """Query, key, value and output matrices of all layers."""
    mlp: int
    """MLP matrices of all layers, all experts."""
    mlp_active: int
    """MLP matrices that one token meets."""
    router: int
    """Router matrices of all layers; 0 for a dense model."""
    norm: int
    """Weights of all norms."""
    matmul_active: int
    """Parameters that one token is multiplied with: attention, router, its experts, and the output head (also when
    tied). The embedding is a lookup and the norms are elementwise, so neither is in it."""

    @property
    def non_embedding(self) -> int:
        """All but the input embedding and the output head."""
        return self.total - self.embedding - self.head


def count(config: ModelConfig) -> Params:
    """Count the parameters of ``config``.

    Layer: q ``hidden x heads x head_dim``, k and v ``hidden x kv_heads x head_dim`` each, o as q; MLP ``hidden x
    intermediate`` three times when gated, twice otherwise, times the experts; router ``hidden x experts``; two norms
    of ``hidden`` and, with ``qk_norm``, two of ``head_dim``. No biases anywhere.
    """
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.width_per_head
    one_mlp = hidden * config.intermediate_size * (3 if config.gated else 2)
    experts, chosen = (config.moe.num_experts, config.moe.num_experts_per_tok) if config.moe else (1, 1)
    attention = layers * hidden * head_dim * 2 * (config.num_attention_heads + config.kv_heads)
    mlp, mlp_active = layers * one_mlp * experts, layers * one_mlp * chosen
    router = layers * hidden * experts if config.moe else 0
    norm = layers * (2 * hidden + (2 * head_dim if config.qk_norm else 0)) + hidden
    embedding = config.vocab_size * hidden
    head = 0 if config.tie_word_embeddings else embedding
    total = embedding + head + attention + mlp + router + norm
    return Params(
        total=total,
        active=total - mlp + mlp_active,
        embedding=embedding,
        head=head,
        attention=attention,
        mlp=mlp,
        mlp_active=mlp_active,
        router=router,
        norm=norm,
        matmul_active=attention + mlp_active + router + embedding,
    )
