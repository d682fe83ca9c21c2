"""The ``model:`` section: one decoder-only transformer, dense or mixture-of-experts. Names are Hugging Face's."""

from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.schema import Config, Real, Whole, placement


class MoEConfig(Config):
    """A dropless top-k mixture of experts in place of each MLP."""

    num_experts: Whole = Field(ge=2)
    """Experts in each layer."""
    num_experts_per_tok: Whole = Field(ge=1)
    """Experts that each token uses (top-k)."""
    balance_loss_coef: Real = Field(0.01, ge=0)
    """Weight of the load-balance loss (a sum over sequences, weighted by their tokens)."""
    z_loss_coef: Real = Field(1e-3, ge=0)
    """Weight of the router z-loss (a sum over tokens of logsumexp squared)."""
    kernel: Literal["grouped", "loop"] = placement("grouped")
    """``grouped``: one grouped matmul over all experts; ``loop``: the naive reference, one expert after another."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}"
            )
        return self


class ModelConfig(Config):
    """Shape and options of the model; with the seed it fixes the initial weights."""

    family: Literal["llama", "dbrx", "decoder"] = "llama"
    """``llama`` (dense) and ``dbrx`` (mixture of experts) export to Hugging Face; ``decoder`` mixes freely."""
    vocab_size: Whole = Field(ge=2)
    """Rows of the embedding; at least the tokenizer's size."""
    hidden_size: Whole = Field(ge=1)
    """Width of the residual stream."""
    intermediate_size: Whole = Field(ge=1)
    """Width inside the MLP, or inside each expert."""
    num_hidden_layers: Whole = Field(ge=1)
    """Number of blocks."""
    num_attention_heads: Whole = Field(ge=1)
    """Query heads."""
    num_key_value_heads: Whole | None = Field(None, ge=1)
    """Key and value heads (grouped-query attention); absent: as many as query heads."""
    head_dim: Whole | None = Field(None, ge=2)
    """Width of a head; absent: hidden_size / num_attention_heads."""
    max_position_embeddings: Whole = Field(2048, ge=1)
    """Longest sequence that the model is meant for, in tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation; layernorm has a weight and no bias."""
    norm_eps: Real = Field(1e-5, gt=0)
    """Added under the root of the norm."""
    activation: Literal["silu", "gelu"] = "silu"
    """Activation in the MLP."""
    gated: bool = True
    """Gated MLP (SwiGLU, GEGLU) with three matrices; otherwise two."""
    rope_theta: Real = Field(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    qk_norm: bool = False
    """RMSNorm over each head's query and key before rotation (family ``decoder`` only)."""
    clip_qkv: Real | None = Field(None, gt=0)
    """Clamp queries, keys and values to +- this value, as DBRX and MPT do."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output head."""
    initializer_range: Real = Field(0.02, gt=0)
    """Standard deviation of initial weights; matrices that write to the residual stream get it / sqrt(2 layers)."""
    moe: MoEConfig | None = None
    """Present: every MLP is a mixture of experts."""

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads after the default."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width_per_head(self) -> int:
        """Width of one head after the default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}"
            )
        if self.num_attention_heads % self.kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.kv_heads}"
            )
        if self.width_per_head % 2:
            raise ValueError(f"a head of {self.width_per_head} is odd; rotary embedding needs an even width")
        return self

    @model_validator(mode="after")
    def _family_can_hold_it(self) -> Self:
        breaks: list[str] = []
        if self.family == "llama":
            breaks = [
                text
                for bad, text in (
                    (self.moe is not None, "moe (dense only)"),
                    (self.norm != "rmsnorm", "norm (rmsnorm only)"),
                    (not self.gated, "gated (true only)"),
                    (self.clip_qkv is not None, "clip_qkv (absent only)"),
                    (self.qk_norm, "qk_norm (false only)"),
                    (
                        self.hidden_size % self.num_attention_heads != 0,
                        f"hidden_size={self.hidden_size} with num_attention_heads={self.num_attention_heads} "
                        "(multiples only, also with head_dim)",
                    ),
                )
                if bad
            ]
        if self.family == "dbrx":
            breaks = [
                text
                for bad, text in (
                    (self.moe is None, "moe (required)"),
                    (self.norm != "layernorm", "norm (layernorm only)"),
                    (self.norm_eps != 1e-5, "norm_eps (1e-5 only)"),
                    (not self.gated, "gated (true only)"),
                    (self.qk_norm, "qk_norm (false only)"),
                    (self.tie_word_embeddings, "tie_word_embeddings (false only)"),
                    (self.head_dim is not None, "head_dim (absent only)"),
                )
                if bad
            ]
        if breaks:
            raise ValueError(
                f"family '{self.family}' cannot hold: {', '.join(breaks)}; "
                "family 'decoder' takes any mix, but does not export to Hugging Face"
            )
        return self
