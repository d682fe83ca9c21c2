"""What ``init_from`` names: which model and tokenizer its weights belong to, and whether a run may start from them.

Promises: weights are loaded only into the model that they were learned in and for the tokenizer that they were learned
with, also where the shapes are the same. Reads configs and ``tokenizer.json``, no weights.
"""

from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.load import from_dict
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.config.show import flatten
from smalti.config.yaml_lines import parse
from smalti.model.huggingface import open_folder

_OF_TRAINING = (
    "family",
    "initializer_range",
    "moe.balance_loss_coef",
    "moe.global_balance_loss_coef",
    "moe.z_loss_coef",
    "moe.bias_update_rate",
    "moe.kernel",
)
"""Fields that do not change what the weights compute (the family is a form in which they are written)."""
_MAY_BE_ADDED = ("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping")
"""Bounds that a run may give to a model that had none, to keep it stable."""
_LONGEST = "max_position_embeddings"


def model_of(source: str | Path) -> ModelConfig:
    """The model section of a Hugging Face folder, a run or a checkpoint. DataError where it is none of them."""
    path = Path(source)
    if (path / "config.json").is_file():
        return open_folder(path).config
    run = run_of(path)
    if run is None:
        raise DataError(
            f"{source} is none of: a run folder with a checkpoint, a checkpoint, a Hugging Face folder",
            hint="runs/NAME, runs/NAME/checkpoints/step-NNNNNNNN, or a folder with a config.json",
        )
    text = (run / "config.yaml").read_text(encoding="utf-8")
    section = parse(text, f"{run}/config.yaml").value.get("model")  # alone: the rest may be of another version
    return from_dict(ModelConfig, section, f"{run}/config.yaml").config


def check(config: RunConfig) -> list[str]:
    """UserError where the run's model or tokenizer is not that of ``init_from``; returns what is knowingly different,
    a line for people each."""
    if config.init_from is None:
        return []
    lines = _check_model(config.model, model_of(config.init_from), config.init_from)
    return lines + _check_tokenizer(config.data.tokenizer, config.init_from)


def run_of(path: Path) -> Path | None:
    """The run that a path is, or that a checkpoint is in."""
    of_checkpoint = path.absolute().parent.parent if (path / "train_state.json").is_file() else path
    return of_checkpoint if (of_checkpoint / "config.yaml").is_file() else None


# ---- model ----------------------------------------------------------------------------------------------------------


def _check_model(wanted: ModelConfig, learned: ModelConfig, source: str) -> list[str]:
    ours, theirs = _computed(wanted), _computed(learned)
    apart = {key: (ours.get(key), theirs.get(key)) for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)}
    added = {key: value for key, (value, before) in apart.items() if key in _MAY_BE_ADDED and before is None}
    refused = [key for key in apart if key not in added]
    if refused:
        key = refused[0]
        mine, other = apart[key]
        raise UserError(
            f"model.{key} is {_text(mine)}; in init_from={source} it is {_text(other)}"
            + (f" ({len(refused) - 1} more differ: {', '.join(refused[1:5])})" if refused[1:] else ""),
            allowed="the model section that the weights were learned in",
            hint=f"smalti config model {source} prints it",
        )
    _check_biases(wanted, learned, source)
    lines = [f"model.{key}={_text(value)} is new to the weights of {source}" for key, value in added.items()]
    if wanted.router_weighs_alike:
        lines.append(
            f"one expert a token with weight 1, as {source} has it: the router learns from its balance losses alone"
        )
    longest, learned_longest = wanted.max_position_embeddings, learned.max_position_embeddings
    if longest > learned_longest:
        lines.append(
            f"model.{_LONGEST}={longest} is beyond the {learned_longest} that the weights of {source} were made for"
        )
    return lines


def _check_biases(wanted: ModelConfig, learned: ModelConfig, source: str) -> None:
    """The biases of a router's choice are learned, but no option of their own says that they exist."""
    mine, other = (model.moe.bias_update_rate if model.moe else 0.0 for model in (wanted, learned))
    if other and not mine:
        raise UserError(
            f"the routers in init_from={source} choose experts with biases, and model.moe.bias_update_rate=0 has none",
            allowed="a rate above 0: without their biases these routers choose other experts",
            hint=f"model.moe.bias_update_rate={other:g}, as the weights were learned with",
        )


def _computed(model: ModelConfig) -> dict[str, Any]:
    """All that decides what the weights compute, defaults resolved; the longest sequence is compared elsewhere."""
    values = model.model_dump(mode="json")
    values |= {"num_key_value_heads": model.kv_heads, "head_dim": model.width_per_head}
    layers = range(model.num_hidden_layers)
    values |= {"layer_types": None, "sliding_window": [model.window(layer) for layer in layers]}
    if model.moe is not None:
        values["moe"] |= {"intermediate_size": model.expert_width}
        if all(map(model.has_experts, layers)):
            values["intermediate_size"] = None  # no MLP has it
    values = flatten(values)
    return {key: value for key, value in values.items() if key not in (*_OF_TRAINING, _LONGEST)}


def _text(value: Any) -> str:
    return "absent" if value is None else str(value)


# ---- tokenizer ------------------------------------------------------------------------------------------------------


def _check_tokenizer(ours: str | None, source: str) -> list[str]:
    """By content: the entries with their ids, and the merges. Ours may have more entries, where theirs end."""
    run = run_of(Path(source))
    folder = Path(source) if run is None else run / "tokenizer"
    mine, theirs = None if ours is None else _read(ours), _read(folder)
    if mine is None or theirs is None:
        what = f"nothing checks that the tokenizer of init_from={source} wrote the data"
        return [f"{what}; name it: data.tokenizer={folder}" if ours is None and theirs is not None else what]
    apart = [token for token, id_ in theirs[0].items() if mine[0].get(token) != id_]
    if apart or mine[1] != theirs[1]:
        first = apart[0] if apart else None
        what = "their merges differ" if first is None else (
            f"{first!r} has the id {theirs[0][first]} there and {mine[0].get(first, 'none')} here"
        )  # fmt: skip
        raise UserError(
            f"the weights of init_from={source} were learned with another tokenizer ({folder}) than wrote the data "
            f"(data.tokenizer={ours}): {what}",
            allowed="data in the tokenizer of the weights",
            hint=f"write the tokens again: smalti data tokenize RECIPE tokenizer={folder}",
        )
    return []


def _read(folder: str | Path) -> tuple[dict[str, int], list[tuple[str, ...]]] | None:
    """Entry -> id with the added ones, and merges; None where there is no such table (no file, or Unigram)."""
    if not store.exists(store.join(folder, "tokenizer.json")):
        return None
    parts = store.read_json(store.join(folder, "tokenizer.json"))
    vocab = parts.get("model", {}).get("vocab")
    if not isinstance(vocab, dict):
        return None
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", [])}
    merges = parts["model"].get("merges") or []
    return vocab | added, [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
