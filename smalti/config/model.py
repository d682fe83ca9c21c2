"""The ``model:`` section: a decoder-only transformer, dense or MoE. Field names are Hugging Face's."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from smalti.config.families import FAMILIES, FamilyName, misfits
from smalti.config.schema import Config, NotAllowed, Real, Whole, placement


class MoEConfig(Config):
    """A dropless top-k MoE in place of each MLP."""

    num_experts: Whole = Field(ge=2)
    """Number of experts in each layer."""
    num_experts_per_tok: Whole = Field(ge=1)
    """Number of experts that the router chooses for each token (top-k)."""
    intermediate_size: Whole | None = Field(None, ge=1)
    """Width inside each expert; absent: the model's ``intermediate_size``."""
    num_shared_experts: Whole = Field(0, ge=0)
    """Number of experts that every token uses besides the chosen ones; computed as one MLP of their total width."""
    mlp_only_layers: tuple[Whole, ...] = ()
    """Layers, counted from 0, with a plain MLP instead of experts."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to scores: over all experts, or for each expert separately (DeepSeek-V3)."""
    norm_topk_prob: bool = True
    """Divide the scores of the chosen experts by their p-norm."""
    norm_topk_p: Real = Field(1.0, ge=1)
    """The p of that norm; 1 is the sum."""
    routed_scaling_factor: Real = Field(1.0, gt=0)
    """Factor on the output of the chosen experts."""
    balance_loss_coef: Real = Field(0.01, ge=0)
    """Weight of the load-balance loss (a sum over sequences, weighted by their tokens); 0: none."""
    global_balance_loss_coef: Real = Field(0.0, ge=0)
    """Weight of a load-balance loss relative to the load of the previous step's whole batch; 0: none."""
    bias_update_rate: Real = Field(0.0, ge=0)
    """Change per step of each expert's selection bias: up if underused, down if overused (DeepSeek-V3); 0: none."""
    z_loss_coef: Real = Field(1e-3, ge=0)
    """Weight of the router z-loss (a sum over tokens of logsumexp squared); 0: none."""
    router_initializer_range: Real | None = Field(None, gt=0)
    """Standard deviation of the routers' initial weights; absent: the model's ``initializer_range``."""
    router_lr_frac: Real = Field(1.0, gt=0, le=1)
    """The routers' learning rate as a fraction of ``train.optimizer.lr``; with a larger ``balance_loss_coef`` a smaller
    one keeps experts in balance."""
    kernel: Literal["grouped", "loop"] = placement("grouped")
    """``grouped``: one grouped matmul over all experts; ``loop``: one expert after another, the reference."""

    @model_validator(mode="after")
    def _top_k_fits(self) -> Self:
        if self.num_experts_per_tok > self.num_experts:
            raise NotAllowed(
                f"num_experts_per_tok={self.num_experts_per_tok} is more than num_experts={self.num_experts}",
                allowed=f"1 to {self.num_experts}",
                hint="use fewer experts a token, or set model.moe.num_experts",
            )
        if not self.norm_topk_prob and self.norm_topk_p != 1:
            raise ValueError(f"norm_topk_p={self.norm_topk_p} has no effect with norm_topk_prob=false")
        return self


class RopeScalingConfig(Config):
    """Rotary frequencies for longer contexts. Keys and meaning are those of Hugging Face's ``rope_scaling``."""

    rope_type: Literal["linear", "dynamic", "yarn", "llama3", "longrope"]
    """The scaling rule; each takes only its own keys below."""
    factor: Real | None = Field(None, ge=1)
    """Ratio of the longer context to the original one."""
    original_max_position_embeddings: Whole | None = Field(None, ge=1)
    """Longest sequence before scaling, in tokens (yarn, llama3, longrope)."""
    attention_factor: Real | None = Field(None, gt=0)
    """Factor on cosines and sines (yarn, longrope); absent: computed by the rule."""
    beta_fast: Real | None = Field(None, gt=0)
    """Rotations above which a frequency is unchanged (yarn); absent: 32."""
    beta_slow: Real | None = Field(None, gt=0)
    """Rotations below which a frequency is interpolated (yarn); absent: 1."""
    mscale: Real | None = Field(None, gt=0)
    """Numerator of yarn's attention factor; used with ``mscale_all_dim``."""
    mscale_all_dim: Real | None = Field(None, gt=0)
    """Denominator of yarn's attention factor; used with ``mscale``."""
    truncate: bool | None = None
    """Round the ends of yarn's ramp to whole dimensions; absent: true."""
    low_freq_factor: Real | None = Field(None, gt=0)
    """Wavelengths above original length / this value are divided by ``factor`` (llama3)."""
    high_freq_factor: Real | None = Field(None, gt=0)
    """Wavelengths below original length / this value are unchanged (llama3)."""
    short_factor: tuple[Real, ...] | None = None
    """Divisor of each frequency for sequences up to the original length (longrope)."""
    long_factor: tuple[Real, ...] | None = None
    """Divisor of each frequency for longer sequences (longrope)."""

    @model_validator(mode="after")
    def _keys_belong_to_the_rule(self) -> Self:
        required, optional = ROPE_KEYS[self.rope_type]
        present = {name for name in type(self).model_fields if getattr(self, name) is not None} - {"rope_type"}
        if missing := sorted(required - present):
            raise ValueError(f"rope_type '{self.rope_type}' needs {', '.join(missing)}")
        if extra := sorted(present - required - optional):
            raise ValueError(f"rope_type '{self.rope_type}' does not use {', '.join(extra)}")
        return self


ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
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
"""Rule -> (required keys, optional keys)."""


class ModelConfig(Config):
    """Architecture of the model; together with the seed it determines the initial weights."""

    family: FamilyName = "llama"
    """Architecture of Hugging Face folders; ``decoder`` allows any combination of options, but cannot be exported."""
    vocab_size: Whole = Field(ge=2)
    """Number of rows of the embedding; at least the tokenizer's size."""
    hidden_size: Whole = Field(ge=1)
    """Width of the residual stream."""
    intermediate_size: Whole = Field(ge=1)
    """Width inside the MLP, or inside each expert."""
    num_hidden_layers: Whole = Field(ge=1, le=10_000)
    """Number of blocks; at most 10,000."""
    num_attention_heads: Whole = Field(ge=1)
    """Number of query heads."""
    num_key_value_heads: Whole | None = Field(None, ge=1)
    """Number of key and value heads (grouped-query attention); absent: as many as query heads."""
    head_dim: Whole | None = Field(None, ge=2)
    """Width of a head; absent: hidden_size / num_attention_heads."""
    max_position_embeddings: Whole = Field(2048, ge=1)
    """Longest sequence, in tokens."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Normalisation; ``layernorm`` has a weight and no bias."""
    norm_eps: Real = Field(1e-5, gt=0)
    """Epsilon of the norm, added to the mean square (variance) before the root."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Normalise the input of attention and MLP (``pre``) or their output (``post``, OLMo 2)."""
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    """Activation in the MLP; ``gelu`` is exact, ``gelu_tanh`` the approximation."""
    gated: bool = True
    """Gated MLP (SwiGLU, GEGLU) with three matrices; false: two matrices."""
    attention_bias: bool = False
    """Biases on the query, key, value and output projections."""
    mlp_bias: bool = False
    """Biases on the matrices of a plain MLP (not of experts)."""
    position: Literal["rope", "alibi"] = "rope"
    """Rotary embedding, or a linear penalty on distance with a slope for each head (ALiBi)."""
    rope_theta: Real = Field(10_000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScalingConfig | None = None
    """Rotary frequencies for longer contexts; absent: unscaled."""
    sliding_window: Whole | None = Field(None, ge=1)
    """Attention window in tokens, the token itself included; absent: unlimited."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    """Layers with the window; absent: all, if ``sliding_window`` is set."""
    qk_norm: Literal["head", "full"] | None = None
    """RMSNorm of queries and keys before rotation: for each head (Qwen3) or over all heads (OLMo 2); absent: none."""
    clip_qkv: Real | None = Field(None, gt=0)
    """Clamp queries, keys and values to +- this value (DBRX, MPT), after ``qk_norm``; absent: no clamp."""
    attention_multiplier: Real | None = Field(None, gt=0)
    """Factor on the attention scores; absent: head_dim ^ -0.5."""
    attn_logit_softcapping: Real | None = Field(None, gt=0)
    """Soft cap c of the attention scores: c tanh(score / c); absent: none."""
    final_logit_softcapping: Real | None = Field(None, gt=0)
    """Soft cap c of the output logits: c tanh(logit / c); absent: none."""
    embedding_norm: bool = False
    """Normalise the output of the embedding."""
    residual_multiplier: Real = Field(1.0, gt=0)
    """Factor on the outputs of attention and MLP in the residual stream."""
    tie_word_embeddings: bool = False
    """Use the embedding as the output head."""
    num_labels: Literal[1] | None = None
    """1: a reward model, with one score of each token in place of the logits; absent: a language model."""
    initializer_range: Real = Field(0.02, gt=0)
    """Standard deviation of initial weights; divided by sqrt(2 layers) for matrices that write to the residual
    stream."""
    moe: MoEConfig | None = None
    """The experts; absent: a dense model."""

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads, with the default applied."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def width_per_head(self) -> int:
        """Width of one head, with the default applied."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def expert_width(self) -> int:
        """Width inside one expert, with the default applied; of the MLP in a dense model."""
        return (self.moe.intermediate_size if self.moe else None) or self.intermediate_size

    @property
    def router_weighs_alike(self) -> bool:
        """True where the only expert of a token has weight 1 by normalisation, so the router gets no gradient."""
        return self.moe is not None and self.moe.num_experts_per_tok == 1 and self.moe.norm_topk_prob

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.moe is not None and layer not in self.moe.mlp_only_layers

    def window(self, layer: int) -> int | None:
        """Return a layer's sliding window in tokens; None where it has none."""
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
        if self.num_labels and self.final_logit_softcapping:
            raise ValueError("final_logit_softcapping has no effect with num_labels: a reward model has no logits")
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
        section = {**_values(self), "moe": _values(self.moe) if self.moe else None}
        breaks = misfits(self.family, section, _defaults(type(self)), _defaults(MoEConfig))
        if breaks:
            fixes = "".join(f" {name}={value}" for name, value in FAMILIES[self.family].fixed.items())
            raise ValueError(
                f"family '{self.family}' cannot hold: {', '.join(breaks)}; "
                + (f"it has{fixes}; " if fixes else "")
                + "family 'decoder' takes any mix, but does not export to Hugging Face"
            )
        return self


def _values(section: Config) -> dict[str, Any]:
    return {name: getattr(section, name) for name in type(section).model_fields}


def _defaults(kind: type[Config]) -> dict[str, Any]:
    return {name: field.get_default() for name, field in kind.model_fields.items()}
