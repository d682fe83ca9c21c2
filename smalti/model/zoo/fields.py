"""Reads ``config.json`` key by key, and refuses it if a key is left that may change the logits.

Guarantees: an option that our blocks do not compute is refused by name, never approximated or ignored; values have
the requested type. Defaults of absent keys are the caller's: those of the config classes of transformers 5.23.
"""

import json
import re
from typing import Any

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig, RopeScalingConfig

Json = dict[str, Any]

LARGEST_LAYERS = 100_000
"""Bound on layers x experts."""
_REQUIRED = object()

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

_HARMLESS = frozenset(
    re.findall(
        r"\S+",
        """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures attn_implementation
    auto_map dtype finetuning_task id2label is_decoder is_llama_config keys_to_ignore_at_inference label2id
    model_type name num_labels output_attentions output_hidden_states output_router_logits output_scores prefix
    problem_type return_dict return_dict_in_generate task_specific_params tf_legacy_loss tokenizer_class
    tokenizer_name torch_dtype torchscript transformers.js_config transformers_version unsloth_fixed unsloth_version
    use_bfloat16 use_cache verbose
    bos_token_id cls_token_id decoder_start_token_id eos_token_id mask_token_id pad_token_id sep_token_id
    unk_token_id bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id
    length_penalty max_length max_new_tokens min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """,
    )
)
"""Keys that do not change logits: origin of the file, dtype, token ids, options of ``generate``.

``auto_map`` is checked in ``huggingface_config.py``.
"""

_ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "chunk_size_feed_forward": (0,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1,),
    "pretraining_tp": (1,),
    "pruned_heads": ({}, []),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_sliding_window": (False,),
}
"""Key -> values that do not change the logits, for families that do not read the key."""


class Fields:
    """A JSON object of options; ``take`` marks a key as read, ``finish`` refuses the others."""

    def __init__(self, raw: Json, section: str = "") -> None:
        self._raw = raw
        self._section = section
        self._taken: set[str] = set()

    def take(self, key: str, kind: type, default: Any = _REQUIRED, *, maximum: int = 2**31 - 1) -> Any:
        """Return the value of ``key``, of type ``kind`` (int, float, bool, str, list), or None if it is null.

        If the key is absent, returns ``default``; DataError without one, and for a value of another type.
        """
        self._taken.add(key)
        value = self._raw.get(key, default)
        if value is _REQUIRED or (value is None and default is _REQUIRED):
            raise DataError(
                f"config.json has no '{self._section}{key}'", hint="is this the config.json of a causal language model?"
            )
        if value is None or value is default:
            return value
        is_valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float:
            is_valid = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_valid or (kind is int and abs(value) > maximum):
            raise self.refusal(
                key, "it cannot be", allowed=f"a {_KINDS[kind]}" + (f" up to {maximum:,}" if kind is int else "")
            )
        return float(value) if kind is float else value

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Raise DataError if ``key`` has a value that is not in ``allowed``; it may be absent."""
        self._taken.add(key)
        if key in self._raw and not any(self._raw[key] == value for value in allowed):
            raise self.refusal(key, why, allowed=" or ".join(map(json.dumps, allowed)))

    def ignore(self, key: str) -> None:
        """Mark a key as read whatever its value, because it does not change the logits of this family."""
        self._taken.add(key)

    def section(self, key: str) -> "Fields":
        """Return the object under ``key``; an empty one if it is absent or null."""
        self._taken.add(key)
        value = self._raw.get(key) or {}
        if not isinstance(value, dict):
            raise self.refusal(key, "not an object", allowed="an object")
        return Fields(value, f"{self._section}{key}.")

    def not_null(self) -> Json:
        """Mark all keys as read and return those that are not null."""
        self._taken |= self._raw.keys()
        return {key: value for key, value in self._raw.items() if value is not None}

    def activation(self, key: str, default: str) -> str:
        """Return our name of Hugging Face's activation."""
        name = self.take(key, str, default)
        if name not in _ACTIVATIONS:
            raise self.refusal(key, "this activation is not supported", allowed=", ".join(_ACTIVATIONS))
        return _ACTIVATIONS[name]

    def refusal(self, key: str, why: str, *, allowed: str | None = None, hint: str | None = None) -> DataError:
        """Return an error that names an option and its value."""
        value = repr(self._raw.get(key))
        return DataError(
            f"config.json has {self._section}{key}={value if len(value) < 200 else value[:200] + '...'}: {why}",
            allowed=allowed,
            hint=hint,
        )

    def finish(self) -> None:
        """Raise DataError for a key that was not read, unless it is null or known not to change the logits."""
        for key, value in self._raw.items():
            if key in self._taken or key in _HARMLESS or value is None:
                continue
            if key.endswith(("dropout", "pdrop")):
                self.only(key, (0,), "our blocks have no dropout")
            elif key in _ONLY:
                self.only(key, _ONLY[key], "this family does not compute it")
            else:
                raise self.refusal(key, "unknown option", allowed="absent")

    def build(self, fields: Json) -> ModelConfig:
        """Call ``finish`` and return the ``ModelConfig`` of converted fields; DataError if it refuses their values."""
        self.finish()
        try:
            config = from_dict(ModelConfig, fields, "config.json, by our names").config
        except UserError as error:
            raise DataError(error.message, allowed=error.allowed, hint=error.hint) from error
        experts = config.moe.num_experts if config.moe else 1
        if config.num_hidden_layers * experts > LARGEST_LAYERS:
            raise DataError(
                f"config.json has {config.num_hidden_layers} layers" + (f" of {experts} experts" if config.moe else ""),
                allowed=f"layers x experts up to {LARGEST_LAYERS:,}",
            )
        if config.head_dim is not None and config.head_dim * config.num_attention_heads == config.hidden_size:
            config = config.model_copy(update={"head_dim": None})
        return config


_KINDS = {int: "whole number", float: "number", bool: "boolean", str: "text", list: "list"}


def activation_to_huggingface(config: ModelConfig) -> str:
    """Return Hugging Face's name of the activation."""
    return "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation


# ---- rotary positions -----------------------------------------------------------------------------------------------


def rope_to_huggingface(config: ModelConfig) -> Json:
    """Return ``rope_parameters`` for transformers 5, and ``rope_theta`` and ``rope_scaling`` for older versions."""
    scaling = {} if config.rope_scaling is None else config.rope_scaling.model_dump(mode="json", exclude_none=True)
    return {
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        **({"rope_scaling": scaling} if scaling else {}),
    }


def rope_from_huggingface(raw: Fields, default_theta: float, max_positions: int) -> Json:
    """Return our ``rope_theta`` and ``rope_scaling``, from ``rope_parameters`` or from the keys before transformers 5.

    If a file has both they must agree, because readers differ in which one they use. max_positions: the original
    length if the file has none.
    """
    original = raw.take("original_max_position_embeddings", int, None)
    forms = [_one_form(raw, key, original or max_positions) for key in ("rope_parameters", "rope_scaling")]
    thetas = {raw.take("rope_theta", float, None), *(theta for theta, _ in forms)} - {None}
    if len(thetas) > 1:
        raise DataError(
            f"config.json gives two bases for the rotary frequencies: {' and '.join(map(str, sorted(thetas)))}",
            hint="keep the one that the model was trained with",
        )
    scalings = [scaling for _, scaling in forms if scaling is not None]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise DataError(
            "config.json has different scalings of the rotary frequencies in rope_parameters and rope_scaling",
            hint="keep the one that the model was trained with",
        )
    scaling = scalings[0] if scalings else {}
    if original not in (None, scaling.get("original_max_position_embeddings")):
        raise raw.refusal("original_max_position_embeddings", "the scaling of the rotary frequencies has another value")
    return {"rope_theta": thetas.pop() if thetas else default_theta, "rope_scaling": scaling or None}


def _one_form(raw: Fields, key: str, original: int) -> tuple[float | None, Json | None]:
    """Return base and scaling under ``key``; the scaling is None if the key is absent, {} if nothing is scaled."""
    section = raw.section(key)
    if not section.not_null():
        return None, None
    kind = section.take("rope_type", str, section.take("type", str, "default"))
    theta = section.take("rope_theta", float, None)
    section.only("partial_rotary_factor", (None, 1), "only rotation of whole heads is supported")
    options = {name: value for name, value in section.not_null().items() if name not in _NOT_SCALING}
    if kind == "default" and not options:
        return theta, {}
    if kind in ("yarn", "llama3", "longrope"):
        options.setdefault("original_max_position_embeddings", original)
    try:
        scaling = from_dict(RopeScalingConfig, options | {"rope_type": kind}, key).config
    except UserError as error:
        raise raw.refusal(key, error.message, allowed=error.allowed, hint=error.hint) from error
    return theta, scaling.model_dump(exclude_none=True)


_NOT_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


# ---- the keys of Llama's config, which most families share -----------------------------------------------------------


def shape_to_huggingface(config: ModelConfig) -> Json:
    """Return the keys that all families with Llama's config have."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.kv_heads,
        "hidden_act": activation_to_huggingface(config),
        "max_position_embeddings": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        **rope_to_huggingface(config),
    }


def shape_from_huggingface(
    raw: Fields,
    *,
    max_positions: int,
    norm_eps: float,
    kv_heads: int | None = None,
    activation: str = "silu",
    rope_theta: float = 10_000.0,
) -> dict[str, Any]:
    """Return the fields of ``ModelConfig`` that these keys give.

    The arguments are the family's defaults of absent keys (``kv_heads`` None: as many as heads).
    """
    longest = raw.take("max_position_embeddings", int, max_positions)
    return {
        "vocab_size": raw.take("vocab_size", int),
        "hidden_size": raw.take("hidden_size", int),
        "intermediate_size": raw.take("intermediate_size", int),
        "num_hidden_layers": raw.take("num_hidden_layers", int, maximum=LARGEST_LAYERS),
        "num_attention_heads": raw.take("num_attention_heads", int),
        "num_key_value_heads": raw.take("num_key_value_heads", int, kv_heads),
        "activation": raw.activation("hidden_act", activation),
        "max_position_embeddings": longest,
        "initializer_range": raw.take("initializer_range", float, 0.02),
        "norm_eps": raw.take("rms_norm_eps", float, norm_eps),
        "tie_word_embeddings": raw.take("tie_word_embeddings", bool, False),
        **rope_from_huggingface(raw, rope_theta, longest),
    }
