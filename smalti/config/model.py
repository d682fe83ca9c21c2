"""The ``model:`` section: one decoder-only transformer, dense or mixture-of-experts. Names are Hugging Face's."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smalti.config.families import FAMILIES, FamilyName, misfits
from smalti.config.schema import Config, Real, Whole, placement


class MoEConfig(Config):
    """A dropless top-k mixture of experts in place of each MLP."""

    num_experts: Whole = Field(ge=2)
    """Experts in each layer."""
    num_experts_per_tok: Whole = Field(ge=1)
    """Experts that each token uses (top-k)."""
    intermediate_size: Whole | None = Field(None, ge=1)
    """Width inside each expert; absent: the model's."""
    num_shared_experts: Whole = Field(0, ge=0)
    """Experts that every token uses, beside those that the router chooses, as one MLP of their joint width."""
    mlp_only_layers: tuple[Whole, ...] = ()
    """Layers, from 0, that have a plain MLP."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores: over all experts together, or of each by itself (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Divide the scores of the chosen experts by their norm."""
    norm_topk_p: Real = Field(1.0, ge=1)
    """Which norm: 1 is their sum."""
    routed_scaling_factor: Real = Field(1.0, gt=0)
    """Factor on what the chosen experts give."""
    balance_loss_coef: Real = Field(0.01, ge=0)
    """Weight of the load-balance loss (a sum over sequences, weighted by their tokens)."""
    global_balance_loss_coef: Real = Field(0.0, ge=0)
    """Weight of a load-balance loss against the load of the whole batch of the step before."""
    bias_update_rate: Real = Field(0.0, ge=0)
    """Step of each expert's bias on the choice, up when it is used too little, down when too much (DeepSeek-V3)."""
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
        if not self.norm_topk_prob and self.norm_topk_p != 1:
            raise ValueError(f"norm_topk_p={self.norm_topk_p} has no effect with norm_topk_prob=false")
        return self


class RopeScalingConfig(Config):
    """Rotary frequencies changed for longer contexts. Keys and meaning are those of Hugging Face's ``rope_scaling``."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    """The rule; each takes the keys below that are its own."""
    factor: Real | None = Field(None, ge=1)
    """How many times longer the context becomes."""
    original_max_position_embeddings: Whole | None = Field(None, ge=1)
    """Longest sequence before (yarn, llama3, longrope)."""
    attention_factor: Real | None = Field(None, gt=0)
    """Factor on cosines and sines (yarn, longrope); absent: the rule's own."""
    beta_fast: Real | None = Field(None, gt=0)
    """Rotations above which a frequency stays (yarn); absent: 32."""
    beta_slow: Real | None = Field(None, gt=0)
    """Rotations below which a frequency is interpolated (yarn); absent: 1."""
    mscale: Real | None = Field(None, gt=0)
    """Part of yarn's attention factor, with ``mscale_all_dim``."""
    mscale_all_dim: Real | None = Field(None, gt=0)
    """Part of yarn's attention factor, with ``mscale``."""
    truncate: bool | None = None
    """Whether yarn rounds the range of its ramp; absent: true."""
    low_freq_factor: Real | None = Field(None, gt=0)
    """Wavelengths above original length / this are divided (llama3)."""
    high_freq_factor: Real | None = Field(None, gt=0)
    """Wavelengths below original length / this stay (llama3)."""
    short_factor: tuple[Real, ...] | None = None
    """A divisor for each frequency, up to the original length (longrope)."""
    long_factor: tuple[Real, ...] | None = None
    """A divisor for each frequency, beyond it (longrope)."""

    @model_validator(mode="after")
    def _keys_belong_to_the_rule(self) -> Self:
        required, optional = _ROPE_KEYS[self.rope_type]
        given = {name for name in type(self).model_fields if getattr(self, name) is not None} - {"rope_type"}
        if missing := sorted(required - given):
            raise ValueError(f"rope_type '{self.rope_type}' needs {', '.join(missing)}")
        if extra := sorted(given - required - optional):
            raise ValueError(f"rope_type '{self.rope_type}' does not use {', '.join(extra)}")
        return self


_ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        {"factor", "original_max_position_embeddings"},
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    ),
    "llama3": ({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}, set()),
    "longrope": (
        {"original_max_position_embeddings", "short_factor", "long_factor"},
        {"factor", "attention_factor"},
    ),
}
"""Keys that each rule needs, and those that it also knows."""


class ModelConfig(Config):
    """Shape and options of the model; with the seed it fixes the initial weights."""

    family: FamilyName = "llama"
    """Each but the last is a form in Hugging Face folders; ``decoder`` mixes freely and is not exported."""
    vocab_size: Whole = Field(ge=2)
    """Rows of the embedding; at least the tokenizer's size."""
    hidden_size: Whole = Field(ge=1)
    """Width of the residual stream."""
    intermediate_size: Whole = Field(ge=1)
    """Width inside the MLP, or inside each expert."""
    num_hidden_layers: Whole = Field(ge=1, le=10_000)
    """Number of blocks; at most 10,000, because plans go through them one by one."""
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
    norm_placement: Literal["pre", "post"] = "pre"
    """Norm of what attention and MLP read, or of what they write (OLMo 2)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Activation in the MLP; ``gelu`` is the exact one."""
    gated: bool = True
    """Gated MLP (SwiGLU, GEGLU) with three matrices; otherwise two."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    mlp_bias: bool = False
    """Biases on the matrices of a plain MLP."""
    position: Literal["rope", "alibi"] = "rope"
    """Rotary positions, or a penalty on distance, linear with a slope for each head (ALiBi)."""
    rope_theta: Real = Field(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Frequencies changed for longer contexts."""
    sliding_window: Whole | None = Field(None, ge=1)
    """A token sees itself and this many minus one tokens before it; absent: all before it."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Which layers have the window; absent: all, where there is one."""
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of query and key before rotation: over each head (Qwen3), or over all heads together (OLMo 2)."""
    clip_qkv: Real | None = Field(None, gt=0)
    """Clamp queries, keys and values to +- this value, as DBRX and MPT do (after ``qk_norm``)."""
    attention_multiplier: Real | None = Field(None, gt=0)
    """Factor on the attention scores; absent: head width ^ -0.5."""
    attn_logit_softcapping: Real | None = Field(None, gt=0)
    """Bound c of the attention scores, as c tanh(score / c)."""
    final_logit_softcapping: Real | None = Field(None, gt=0)
    """Bound c of the output logits, as c tanh(logit / c)."""
    embedding_norm: bool = False
    """Norm of the embedding's output."""
    residual_multiplier: Real = Field(1.0, gt=0)
    """Factor on what attention and MLP add to the residual stream."""
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

    @property
    def expert_width(self) -> int:
        """Width inside one expert after the default; of the MLP where there are no experts."""
        return (self.moe.intermediate_size if self.moe else None) or self.intermediate_size

    @property
    def router_weighs_alike(self) -> bool:
        """One expert a token, its weight divided by itself: the output has no gradient for the router."""
        return self.moe is not None and self.moe.num_experts_per_tok == 1 and self.moe.norm_topk_prob

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's MLP is a mixture of experts."""
        return self.moe is not None and layer not in self.moe.mlp_only_layers

    def window(self, layer: int) -> int | None:
        """A layer's sliding window in tokens; None where a token sees all before it."""
        slides = self.layer_types is None or self.layer_types[layer] == "sliding_attention"
        return self.sliding_window if slides else None

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
        if self.position == "rope" and self.width_per_head % 2:
            raise ValueError(f"a head of {self.width_per_head} is odd; rotary embedding needs an even width")
        return self

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        layers = self.num_hidden_layers
        if self.layer_types is not None:
            if len(self.layer_types) != layers:
                raise ValueError(f"layer_types has {len(self.layer_types)} entries; num_hidden_layers={layers}")
            if self.sliding_window is None and "sliding_attention" in self.layer_types:
                raise ValueError("layer_types has sliding_attention, but sliding_window is absent")
        plain = self.moe.mlp_only_layers if self.moe else ()
        for layer in plain:
            if not 0 <= layer < layers or plain.count(layer) > 1:
                raise ValueError(f"moe.mlp_only_layers has layer {layer}; allowed: 0 to {layers - 1}, each once")
        if len(plain) == layers:
            raise ValueError("moe.mlp_only_layers has all layers, so none has experts; leave moe out")
        return self

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        defaults = _defaults(type(self))
        rotary = [name for name in ("rope_theta", "rope_scaling") if getattr(self, name) != defaults[name]]
        if rotary and self.position == "alibi":
            raise ValueError(f"{', '.join(rotary)} has no effect with position 'alibi'")
        scaling = self.rope_scaling
        for name in ("short_factor", "long_factor"):
            values = getattr(scaling, name) if scaling else None
            if values is not None and len(values) != self.width_per_head // 2:
                raise ValueError(
                    f"rope_scaling.{name} has {len(values)} entries; a head of {self.width_per_head} "
                    f"has {self.width_per_head // 2} frequencies"
                )
        return self

    @model_validator(mode="after")
    def _family_can_hold_it(self) -> Self:
        given = {**_given(self), "moe": _given(self.moe) if self.moe else None}
        breaks = misfits(self.family, given, _defaults(type(self)), _defaults(MoEConfig))
        if breaks:
            fixes = "".join(f" {name}={value}" for name, value in FAMILIES[self.family].fixed.items())
            raise ValueError(
                f"family '{self.family}' cannot hold: {', '.join(breaks)}; "
                + (f"it has{fixes}; " if fixes else "")
                + "family 'decoder' takes any mix, but does not export to Hugging Face"
            )
        return self


def _given(section: Config) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}


def _defaults(kind: type[Config]) -> dict[str, Any]:
    return {name: field.get_default() for name, field in kind.model_fields.items()}
