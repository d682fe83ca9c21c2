"""Counts the parameters of a model from its config.

``count`` equals what ``smalti.model.decoder.Decoder`` registers, parameter for parameter (a test compares
them on the meta device).
"""

from dataclasses import dataclass

from smalti.config.model import ModelConfig


@dataclass(frozen=True)
class Params:
    """Parameter counts of one model; every field is a number of scalars."""

    total: int
    """All parameters; a tied output head is counted once."""
    active: int
    """Parameters that one token uses: all but the experts that it is not routed to. Embedding and head included."""
    embedding: int
    """Rows x width of the input embedding."""
    head: int
    """The output head; 0 when it is the embedding. Of a reward model the scores."""
    attention: int
    """Query, key, value and output matrices of all layers."""
    mlp: int
    """MLP matrices of all layers, all experts, the shared ones too."""
    mlp_active: int
    """MLP matrices that one token uses."""
    router: int
    """Router matrices of all layers; 0 for a dense model."""
    norm: int
    """Weights of all norms."""
    bias: int
    """Biases of all layers."""
    output: int
    """The matrix of the logits, or of a reward model's scores; also when it is the embedding."""
    matmul_active: int
    """Parameters that one token is multiplied with: attention, router, its experts, and the output head (also when
    tied). The embedding is a lookup, norms and biases are elementwise, so none of them is in it."""

    @property
    def non_embedding(self) -> int:
        """All but the input embedding and the output head."""
        return self.total - self.embedding - self.head


def count(config: ModelConfig) -> Params:
    """Count the parameters of ``config``.

    Layer: q ``hidden x heads x head_dim``, k and v ``hidden x kv_heads x head_dim`` each, o as q; MLP ``hidden x
    intermediate`` three times when gated, twice otherwise, or as often for each expert, shared or not, with its own
    width; router ``hidden x experts``; two norms of ``hidden`` and, with ``qk_norm``, two of a head or of all heads;
    a bias for each column of attention's matrices and of a plain MLP's. Positions have no parameters.
    """
    hidden, layers, head_dim = config.hidden_size, config.num_hidden_layers, config.width_per_head
    heads, kv_heads, matrices = config.num_attention_heads, config.kv_heads, 3 if config.gated else 2
    moe = sum(config.has_experts(layer) for layer in range(layers))
    plain = hidden * config.intermediate_size * matrices
    expert = hidden * config.expert_width * matrices
    experts, chosen, shared = (0, 0, 0)
    if config.moe is not None:
        experts, chosen = config.moe.num_experts, config.moe.num_experts_per_tok
        shared = config.moe.num_shared_experts
    attention = layers * hidden * head_dim * 2 * (heads + kv_heads)
    bias = layers * (head_dim * (heads + 2 * kv_heads) + hidden) * config.attention_bias
    bias += (layers - moe) * ((matrices - 1) * config.intermediate_size + hidden) * config.mlp_bias
    mlp = (layers - moe) * plain + moe * expert * (experts + shared)
    mlp_active = (layers - moe) * plain + moe * expert * (chosen + shared)
    router = moe * hidden * experts
    qk_norm = {None: 0, "head": 2, "full": heads + kv_heads}[config.qk_norm] * head_dim
    norm = layers * (2 * hidden + qk_norm) + hidden * (1 + config.embedding_norm)
    embedding = config.vocab_size * hidden
    output = hidden * (config.num_labels or config.vocab_size)
    head = 0 if config.tie_word_embeddings and not config.num_labels else output
    total = embedding + head + attention + mlp + router + norm + bias
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
        bias=bias,
        output=output,
        matmul_active=attention + mlp_active + router + output,
    )
