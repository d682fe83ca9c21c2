"""Checks the origin ``init_from`` of a run: whether its model and tokenizer are those of the weights.

Weights are loaded only into the model, and for the tokenizer, that they were trained with, even if the shapes match.
Reads configs and ``tokenizer.json``, no weights.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config import context
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
    "moe.router_initializer_range",
    "moe.router_lr_frac",
    "moe.bias_update_rate",
    "moe.kernel",
)
"""Fields that do not affect what the weights compute (the family is a file format)."""
_MAY_BE_ADDED = ("clip_qkv", "attn_logit_softcapping", "final_logit_softcapping")
"""Bounds that a run may give to a model that had none, to keep it stable."""
_SCORES = "num_labels"
"""The scores of a reward model, which begins as a language model."""
Entries = tuple[dict[str, int], list[tuple[str, ...]]]
"""Ids of the entries of a tokenizer, and its merges."""
_LONGEST = "max_position_embeddings"
_UNSTATED = ("default", "preset ")
"""Beginnings of the origins of values that the recipe does not state."""


def model_of(source: str | Path) -> ModelConfig:
    """Return the model section of a Hugging Face folder, a run or a checkpoint. Raises DataError for anything else."""
    path = Path(source)
    if (path / "config.json").is_file():
        return open_folder(path).config
    run = run_of(path)
    if run is None and (path / "adapter_config.json").is_file():
        raise holds_adapters(str(source))
    if run is None:
        raise DataError(
            f"{source} is none of: a run folder with a checkpoint, a checkpoint, a Hugging Face folder",
            hint="runs/NAME, runs/NAME/checkpoints/step-NNNNNNNN, or a folder with a config.json",
        )
    text = (run / "config.yaml").read_text(encoding="utf-8")
    section = parse(text, f"{run}/config.yaml").value.get("model")  # alone: the rest may be of another version
    return from_dict(ModelConfig, section, f"{run}/config.yaml").config


def check(config: RunConfig, origins: Mapping[str, str] | None = None) -> list[str]:
    """Raise UserError if the run's model or tokenizer is not that of ``init_from``; returns warnings for allowed
    differences, a line each.

    Fields of the context (rotary frequencies, windows) may differ where the recipe states them. ``origins`` of the
    values are those of ``Loaded``; absent, the fields that the config was built with count as stated.
    """
    if config.init_from is None:
        return []
    learned = model_of(config.init_from)
    require_whole(config.init_from)
    stated = _stated(config.model, origins)
    if config.model.vocab_size > learned.vocab_size and vocabulary_line(config) is not None:
        stated.add("vocab_size")
    lines = _check_model(config.model, learned, config.init_from, stated)
    longer = context.warning(config.model, learned, max(seq_len for _, seq_len in config.seq_len_parts))
    lines += [] if longer is None else [f"{longer} the weights of {config.init_from}"]
    return lines + _check_tokenizer(config.data.tokenizer, config.init_from)


def context_line(config: RunConfig) -> str | None:
    """Return how the context differs from that of ``init_from``: ``512 -> 2,048 by yarn, factor 4``; None: it does
    not."""
    return None if config.init_from is None else context.change_line(config.model, model_of(config.init_from))


def run_of(path: Path) -> Path | None:
    """Return the run folder that a path is, or that the checkpoint is in; else None."""
    of_checkpoint = path.absolute().parent.parent if (path / "train_state.json").is_file() else path
    return of_checkpoint if (of_checkpoint / "config.yaml").is_file() else None


def require_whole(source: str) -> None:
    """Raise DataError for a run, or a checkpoint of one, that trained adapters. Reads no weights."""
    run = None if (Path(source) / "config.json").is_file() else run_of(Path(source))
    if run is not None and parse((run / "config.yaml").read_text(encoding="utf-8"), "").value.get("adapter"):
        raise holds_adapters(source)


def holds_adapters(source: str) -> DataError:
    """Return the error for an ``init_from`` that has adapters and no weights of their base."""
    return DataError(
        f"{source} holds adapters, not a whole model",
        allowed="a run that trained all weights, a checkpoint of one, or a Hugging Face folder",
        hint="'smalti export RUN --merge' writes a whole model, RUN/export; to train the adapters on: init_from=BASE "
        "adapter.init_from=RUN/adapter",
    )


# ---- model ----------------------------------------------------------------------------------------------------------


def _stated(model: ModelConfig, origins: Mapping[str, str] | None) -> set[str]:
    """Return the fields of the model's context that the recipe states."""
    if origins is None:
        return set(context.OF_CONTEXT) & model.model_fields_set
    keys = {key.split(".")[1] for key, origin in origins.items()
            if key.startswith("model.") and not origin.startswith(_UNSTATED)}  # fmt: skip
    return set(context.OF_CONTEXT) & keys


def _check_model(wanted: ModelConfig, learned: ModelConfig, source: str, stated: set[str]) -> list[str]:
    ours, theirs = _computed(wanted), _computed(learned)
    changed = {key: (ours.get(key), theirs.get(key)) for key in {**theirs, **ours} if ours.get(key) != theirs.get(key)}
    added = {key: value for key, (value, before) in changed.items() if key in _MAY_BE_ADDED and before is None}
    if "layer_types" in stated:
        stated = stated | {"sliding_window"}  # which _computed resolves by layer
    if changed.get(_SCORES, (None, 0))[1] is None:
        stated = stated | {_SCORES}
    refused = [key for key in changed if key not in added and key.split(".")[0] not in stated]
    if refused:
        key = refused[0]
        mine, other = changed[key]
        may_be_stated = key.split(".")[0] in context.OF_CONTEXT
        raise UserError(
            f"model.{key} is {_text(mine)}; in init_from={source} it is {_text(other)}"
            + (f" ({len(refused) - 1} more differ: {', '.join(refused[1:5])})" if refused[1:] else ""),
            allowed="the model section that the weights were trained with"
            + (", or another value that the recipe states itself" if may_be_stated else ""),
            hint=f"smalti config model {source} prints it",
        )
    _check_biases(wanted, learned, source)
    lines = [f"model.{key}={_text(value)} was not set for the weights of {source}" for key, value in added.items()]
    if wanted.router_weighs_alike:
        lines.append(
            f"one expert a token with weight 1, as in {source}: the router gets gradients from its balance losses alone"
        )
    return lines


def _check_biases(wanted: ModelConfig, learned: ModelConfig, source: str) -> None:
    """Raise UserError if the weights have selection biases that the model lacks; only their update rate says so."""
    mine, other = (model.moe.bias_update_rate if model.moe else 0.0 for model in (wanted, learned))
    if other and not mine:
        raise UserError(
            f"the routers in init_from={source} choose experts with biases, and model.moe.bias_update_rate=0 has none",
            allowed="a rate above 0: without their biases these routers choose other experts",
            hint=f"model.moe.bias_update_rate={other:g}, as in the training of the weights",
        )


def _computed(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that determine what the weights compute, defaults resolved, except the longest sequence."""
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
    """Raise UserError if entries, ids or merges of the tokenizers differ; ours may have more, after theirs."""
    folder = tokenizer_of(source)
    mine, theirs = None if ours is None else entries_of(ours), entries_of(folder)
    if mine is None or theirs is None:
        what = f"it is not checked that the data was tokenized with the tokenizer of init_from={source}"
        return [f"{what}; name it: data.tokenizer={folder}" if ours is None and theirs is not None else what]
    reason = difference(mine, theirs)
    if reason is not None:
        raise UserError(
            f"the weights of init_from={source} were trained with another tokenizer ({folder}) than that of the data "
            f"(data.tokenizer={ours}): {reason}",
            allowed="data tokenized with the tokenizer of the weights",
            hint=f"tokenize the data again: smalti data tokenize RECIPE tokenizer={folder}",
        )
    return []


def difference(ours: Entries, theirs: Entries) -> str | None:
    """Return how tokenizers differ; None where ours has the entries, ids and merges of theirs, and maybe more."""
    changed = next((token for token, id_ in theirs[0].items() if ours[0].get(token) != id_), None)
    if changed is not None:
        return f"{changed!r} has the id {theirs[0][changed]} there and {ours[0].get(changed, 'none')} here"
    return None if ours[1][: len(theirs[1])] == theirs[1] else "their merges differ"


def tokenizer_of(source: str) -> Path:
    """Return the folder of the tokenizer of a Hugging Face folder, a run or a checkpoint."""
    run = run_of(Path(source))
    return Path(source) if run is None else run / "tokenizer"


def vocabulary_line(config: RunConfig) -> str | None:
    """Return ``4,096 -> 4,608 entries``; None where the tokenizers have as many, or are not known."""
    if config.init_from is None or config.data.tokenizer is None:
        return None
    mine, theirs = entries_of(config.data.tokenizer), entries_of(tokenizer_of(config.init_from))
    if mine is None or theirs is None or len(mine[0]) == len(theirs[0]):
        return None
    return f"{len(theirs[0]):,} -> {len(mine[0]):,} entries"


def entries_of(folder: str | Path) -> Entries | None:
    """Return the ids of all entries, and the merges; None without such a table (no file, or Unigram)."""
    if not store.exists(store.join(folder, "tokenizer.json")):
        return None
    parts = store.read_json(store.join(folder, "tokenizer.json"))
    vocab = parts.get("model", {}).get("vocab")
    if not isinstance(vocab, dict):
        return None
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", [])}
    merges = parts["model"].get("merges") or []
    return vocab | added, [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
