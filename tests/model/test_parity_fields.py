"""Every field of the config classes of transformers is honoured, without effect on the logits, or refused by name.

Found out by trying: each field gets other values, and what our reader makes of them must stand in
docs/concepts/model/families.md. A new version of transformers with a new field, or one that we read in another way,
fails here with the lines to write.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from parity import FAMILIES

from smalti.base.errors import DataError
from smalti.config.model import ModelConfig
from smalti.model.huggingface import FAMILIES as READERS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

DOCUMENT = Path(__file__).parents[2] / "docs/concepts/model/families.md"
OUTCOMES = ("honoured", "refused", "without effect")
_LLAMA = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_WINDOWS = {"use_sliding_window": True, "sliding_window": 8}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
_MPT = {"vocab_size": 40, "d_model": 32, "n_heads": 4, "n_layers": 4}
BASE: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA | _WINDOWS | {"max_window_layers": 2, "head_dim": 8},
    "olmo2": _LLAMA,
    "mpt": _MPT | {"attn_config": {}},
    "dbrx": _MPT | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}, "ffn_config": {"moe_top_k": 2}},
    "mixtral": _LLAMA | {"num_local_experts": 8},
    "olmoe": _LLAMA | _EXPERTS,
    "qwen3_moe": _LLAMA | _WINDOWS | _EXPERTS,
}
"""Small models in which every field can have an effect."""


def _read(family: str, raw: dict[str, Any]) -> ModelConfig:
    return READERS[family].config_from_huggingface({"model_type": family, **raw})


def _config_class(family: str) -> type:
    return type(transformers.AutoConfig.for_model(family))


def _own_fields(kind: type) -> list[str]:
    shared = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    return [field.name for field in dataclasses.fields(kind) if field.name not in shared]


def _paths(family: str) -> list[tuple[str, ...]]:
    """Fields of the family's class, those of its sections too."""
    kind = _config_class(family)
    sections: dict[str, type] = kind.sub_configs
    found = [(name,) for name in _own_fields(kind) if name not in sections]
    return found + [(section, name) for section, sub in sections.items() for name in _own_fields(sub)]


def _others(family: str, path: tuple[str, ...]) -> list[Any]:
    """Values that differ from the one in ``BASE``, or else from the default."""
    value: Any = BASE[family]
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    if value is None:
        kind = _config_class(family)
        value = getattr(kind if len(path) == 1 else kind.sub_configs[path[0]], path[-1], None)
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value * 2, value + 1, value / 2, 0.25]
    texts = ["relu", "layernorm", "full"]
    return texts if isinstance(value, str) else [*texts, 1, 6, 2.5, True, *_SHAPED]


_SHAPED = [
    [0],
    ["sliding_attention"] * 4,
    {"name": "relu"},
    {"rope_type": "linear", "factor": 2.0},
]


def _changed(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    key, *rest = path
    return raw | {key: _changed(raw.get(key, {}), tuple(rest), value) if rest else value}


def _outcome(family: str, path: tuple[str, ...]) -> str:
    found = set()
    for value in _others(family, path):
        try:
            same = _read(family, _changed(BASE[family], path, value)) == _read(family, BASE[family])
            found.add("without effect" if same else "honoured")
        except DataError as error:
            if path[-1] in str(error):
                found.add("refused")
    assert found, f"{'.'.join(path)}: no value was read, and none refused by its name"
    return next(outcome for outcome in OUTCOMES if outcome in found)


def _line(outcome: str, paths: list[tuple[str, ...]]) -> str:
    return f"- {outcome}: " + (", ".join(f"`{'.'.join(path)}`" for path in sorted(paths)) or "none")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_honoured_refused_or_without_effect_as_documented(family):
    outcomes = {path: _outcome(family, path) for path in _paths(family)}
    lines = [_line(wanted, [path for path, got in outcomes.items() if got == wanted]) for wanted in OUTCOMES]
    section = DOCUMENT.read_text().split(f"### {family}\n")[1].split("###")[0]
    assert [line for line in section.splitlines() if line.startswith("- ")] == lines


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_writes_by_default_is_read(family):
    """A new field with a value of its own would be refused here."""
    stock = transformers.AutoConfig.for_model(family, **BASE[family])
    raw = json.loads(stock.to_json_string(use_diff=False))
    assert _read(family, raw) == _read(family, json.loads(stock.to_json_string())) == _read(family, BASE[family])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "option",
    [
        {"attention_dropout": 0.1},
        {"embd_pdrop": 0.1},
        {"hidden_dropout": 0.5},
        {"quantization_config": {"bits": 4}},
        {"some_new_option": 1},
    ],
    ids=lambda option: next(iter(option)),
)
def test_dropout_and_unknown_options_are_refused(family, option):
    with pytest.raises(DataError, match=next(iter(option))):
        _read(family, BASE[family] | option)
