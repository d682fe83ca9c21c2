"""``config.json``, read key by key: a key that was not read in the end must be known to leave the logits alone.

Guarantees: an option that our blocks do not compute is refused by its name, never approximated and never passed over;
values have the kind that is asked for. Defaults of absent keys are the caller's: those of the config classes of
transformers 5.23.
"""

import json
import re
from typing import Any

from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig, RopeScalingConfig

Json = dict[str, Any]

LARGEST_LAYERS = 100_000
"""Times experts."""
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
"""Keys that do not change logits: where the file comes from, number format, token ids, how ``generate`` samples.

``auto_map`` is looked at in ``described.py``.
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
"""Keys that leave the logits alone with these values, in a family that does not read them."""


class Fields:
    """A JSON object of options; ``take`` marks a key as understood, ``finish`` refuses what is left over."""

    def __init__(self, raw: Json, section: str = "") -> None:
        self._raw = raw
        self._section = section
        self._taken: set[str] = set()

    def take(self, key: str, kind: type, default: Any = _REQUIRED, *, most: int = 2**31 - 1) -> Any:
        """The value of ``key``, a ``kind`` (int, float, bool, str, list) or None where the file says null.

        Absent, it is ``default``. DataError without a default, and for a value of another kind.
        """
        self._taken.add(key)
        value = self._raw.get(key, default)
        if value is _REQUIRED or (value is None and default is _REQUIRED):
            raise DataError(
                f"config.json has no '{self._section}{key}'", hint="is this the config.json of a causal language model?"
            )
        if value is None or value is default:
            return value
        known = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if kind is float:
            known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or (kind is int and abs(value) > most):
            raise self.refusal(
                key, "it cannot be", allowed=f"a {_KINDS[kind]}" + (f" up to {most:,}" if kind is int else "")
            )
        return float(value) if kind is float else value

    def only(self, key: str, allowed: tuple[Any, ...], why: str) -> None:
        """Refuse any other value; an absent key is fine."""
        self._taken.add(key)
        if key in self._raw and not any(self._raw[key] == value for value in allowed):
            raise self.refusal(key, why, allowed=" or ".join(map(json.dumps, allowed)))

    def ignore(self, key: str) -> None:
        """Take a key as understood whatever its value: it does not change the logits of this family."""
        self._taken.add(key)

    def section(self, key: str) -> "Fields":
        """The object under ``key``; an empty one where it is absent or null."""
        self._taken.add(key)
        value = self._raw.get(key) or {}
        if not isinstance(value, dict):
            raise self.refusal(key, "not an object", allowed="an object")
        return Fields(value, f"{self._section}{key}.")

    def given(self) -> Json:
        """All keys that are not null, as read."""
        self._taken |= self._raw.keys()
        return {key: value for key, value in self._raw.items() if value is not None}

    def activation(self, key: str, default: str) -> str:
        """Our name of Hugging Face's activation."""
        name = self.take(key, str, default)
        if name not in _ACTIVATIONS:
            raise self.refusal(key, "we have no such activation", allowed=", ".join(_ACTIVATIONS))
        return _ACTIVATIONS[name]

    def refusal(self, key: str, why: str, *, allowed: str | None = None, hint: str | None = None) -> DataError:
        """The error that names an option and its value."""
        value = repr(self._raw.get(key))
        return DataError(
            f"config.json has {self._section}{key}={value if len(value) < 200 else value[:200] + '...'}: {why}",
            allowed=allowed,
            hint=hint,
        )

    def finish(self) -> None:
        """Refuse every key that nobody took, unless it is null or known to leave the logits alone."""
        for key, value in self._raw.items():
            if key in self._taken or key in _HARMLESS or value is None:
                continue
            if key.endswith(("dropout", "pdrop")):
                self.only(key, (0,), "our blocks have no dropout")
            elif key in _ONLY:
                self.only(key, _ONLY[key], "this family does not compute it")
            else:
                raise self.refusal(key, "an option that is not known here", allowed="absent")

    def build(self, fields: Json) -> ModelConfig:
        """``finish``, and a ``ModelConfig`` of converted fields; a combination that it refuses is a DataError."""
        self.finish()
        try:
            config = from_dict(ModelConfig, fields, "config.json, by our names").config
        except UserError as error:
            raise DataError(error.message, allowed=error.allowed, hint=error.hint) from error
        experts = config.moe.num_experts if config.moe else 1
        if config.num_hidden_layers * experts > LARGEST_LAYERS:
            raise DataError(
                f"config.json asks for {config.num_hidden_layers} layers"
                + (f" of {experts} experts" if config.moe else ""),
                allowed=f"layers x experts up to {LARGEST_LAYERS:,}",
            )
        if config.head_dim is not None and config.head_dim * config.num_attention_heads == config.hidden_size:
            config = config.model_copy(update={"head_dim": None})
        return config


_KINDS = {int: "whole number", float: "number", bool: "boolean", str: "text", list: "list"}


def activation_to_huggingface(config: ModelConfig) -> str:
    """Hugging Face's name of the activation."""
    return "gelu_pytorch_tanh" if config.activation == "gelu_tanh" else config.activation


# ---- rotary positions -----------------------------------------------------------------------------------------------


def rope_to_huggingface(config: ModelConfig) -> Json:
    """``rope_parameters`` of transformers 5, and ``rope_theta`` and ``rope_scaling`` for older readers."""
    scaling = {} if config.rope_scaling is None else config.rope_scaling.model_dump(mode="json", exclude_none=True)
    return {
        "rope_parameters": {"rope_type": "default", **scaling, "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        **({"rope_scaling": scaling} if scaling else {}),
    }


def rope_from_huggingface(raw: Fields, default_theta: float, max_positions: int) -> Json:
    """``rope_theta`` and ``rope_scaling`` of ours, from ``rope_parameters`` or from the form before transformers 5.

    Where a file has both they must agree, because readers differ in which one they take. max_positions: the original
    length where none is given.
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
            "config.json scales the rotary frequencies in two ways, in rope_parameters and in rope_scaling",
            hint="keep the one that the model was trained with",
        )
    scaling = scalings[0] if scalings else {}
    if original not in (None, scaling.get("original_max_position_embeddings")):
        raise raw.refusal("original_max_position_embeddings", "the scaling of the rotary frequencies differs")
    return {"rope_theta": thetas.pop() if thetas else default_theta, "rope_scaling": scaling or None}


def _one_form(raw: Fields, key: str, original: int) -> tuple[float | None, Json | None]:
    """(base, scaling) that one of the two forms gives; the scaling is None where there is no such form, {} for none."""
    section = raw.section(key)
    if not section.given():
        return None, None
    kind = section.take("rope_type", str, section.take("type", str, "default"))
    theta = section.take("rope_theta", float, None)
    section.only("partial_rotary_factor", (None, 1), "our heads are rotated whole")
    given = {name: value for name, value in section.given().items() if name not in _NOT_SCALING}
    if kind == "default" and not given:
        return theta, {}
    if kind in ("yarn", "llama3", "longrope"):
        given.setdefault("original_max_position_embeddings", original)
    try:
        scaling = from_dict(RopeScalingConfig, given | {"rope_type": kind}, key).config
    except UserError as error:
        raise raw.refusal(key, error.message, allowed=error.allowed, hint=error.hint) from error
    return theta, scaling.model_dump(exclude_none=True)


_NOT_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
