"""Checks the weights of a Hugging Face folder and reads them rule by rule.

Guarantees: ``open_folder`` reads only configs, index and headers, and raises before any weight is read;
``check_values`` reads all weights once, in pieces, before memory is allocated for them; ``tensors`` holds the tensors
of one rule at a time. Pickled weights and code are never opened, nor files outside the folder. Local folders only.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from smalti.base.errors import DataError, UserError
from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.huggingface_config import inside, open_config
from smalti.model.json_file import read_object
from smalti.model.tensor_files import DTYPES, TensorFile
from smalti.model.zoo.fields import Json
from smalti.model.zoo.tensor_names import Rule, Weights

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_PICKLE = (".bin", ".pt", ".pth", ".ckpt")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that are computed from the config instead."""

_SHARD = re.compile(r".+-\d+-of-\d+\.safetensors")
_GENERATION = "generation_config.json"
_COMPANION_FILES = (
    _GENERATION,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_MORE_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True)
class ModelFolder:
    """A folder whose config and headers have been checked."""

    path: Path
    raw: Json
    """``config.json``."""
    config: ModelConfig
    rules: list[Rule]
    files: dict[str, TensorFile]
    """Hugging Face's tensor name -> its file."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter, by our names."""
        return {name: tuple(tensor.shape) for name, tensor in meta_weights(self.config).items()}

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (our name, whole CPU tensor) of every parameter; ``dtype`` None: as in the files."""
        for rule in self.rules:
            ours = rule.to_ours([self.files[name].read(name) for name in rule.theirs])
            while ours:
                yield rule.ours[-len(ours)], ours.pop(0) if dtype is None else ours.pop(0).to(dtype)

    def check_values(self, part: int = 0, of: int = 1) -> None:
        """Raise DataError for a weight that is not finite, or a tied head that differs from the embedding.

        Only every ``of``-th tensor is checked, from number ``part`` on.
        """
        for name in list(self.files)[part::of]:
            if not _DERIVED.search(name):
                self.files[name].check_finite(name)
        if part == 0 and self.config.tie_word_embeddings and _HEAD in self.files:
            embed = next(rule.theirs[0] for rule in self.rules if rule.ours == ("embed.weight",))
            if not torch.equal(self.files[embed].read(embed), self.files[_HEAD].read(_HEAD)):
                raise DataError(f"{self.path} has tie_word_embeddings=true, but its {_HEAD} differs from {embed}")


def companion_files(folder: Path) -> dict[str, bytes]:
    """Read the other files of a model, by name: tokenizer, chat templates, ``generation_config.json``."""
    templates = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    names = [*_COMPANION_FILES, *(f"{_MORE_TEMPLATES}/{path.name}" for path in templates)]
    return {name: inside(folder, name).read_bytes() for name in names if (folder / name).is_file()}


def open_folder(folder: str | Path) -> ModelFolder:
    """Check a folder's config, index and headers; UserError or DataError names what cannot be read, and where."""
    path, raw, family, config = open_config(folder)
    _check_ends("config.json", path, raw, config.vocab_size)
    check_generation(path, config.vocab_size)
    files = _locate(path)
    if config.num_hidden_layers > len(files):
        raise DataError(f"{path}/config.json has {config.num_hidden_layers} layers, but only {len(files)} tensors")
    rules = family.rules(config)
    _check_headers(path, config, rules, files)
    return ModelFolder(path, raw, config, rules, files)


def meta_weights(config: ModelConfig) -> Weights:
    """Return the tensors of ``Decoder(config)`` on the meta device."""
    try:
        with torch.device("meta"):
            return Decoder(config).state_dict()
    except (RuntimeError, OverflowError) as error:
        raise DataError(f"a model of these sizes cannot be built: {error}") from error


def to_huggingface(rules: list[Rule], weights: Weights) -> Weights:
    """Convert all of ``weights`` to Hugging Face's names and shapes; meant for the meta device."""
    converted: Weights = {}
    for rule in rules:
        converted |= zip(rule.theirs, rule.to_theirs([weights[name] for name in rule.ours]), strict=True)
    return converted


def check_generation(folder: Path, vocab_size: int) -> None:
    """Raise DataError where ``generation_config.json``, if there is one, has special tokens outside the vocabulary."""
    if (folder / _GENERATION).exists():
        _check_ends(_GENERATION, folder, read_object(inside(folder, _GENERATION)), vocab_size)


def _check_ends(name: str, folder: Path, raw: Json, vocab_size: int) -> None:
    """Raise DataError for a begin- or end-of-sequence token (or list of the latter) outside the vocabulary."""
    for key, many in (("bos_token_id", False), ("eos_token_id", True)):
        value = raw.get(key)
        ids = value if many and isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise DataError(
                f"{folder / name} has {key}={repr(value)[:60]}",
                allowed=f"null or 0 to {vocab_size - 1} (vocab_size={vocab_size})" + ", or a list of such" * many,
                hint="write the id of that token in tokenizer.json, or null if the model has none",
            )


def _locate(folder: Path) -> dict[str, TensorFile]:
    """Return each tensor's file, from the index or from the single file's header."""
    index, whole = folder / INDEX, folder / WHOLE
    if index.exists() and whole.exists():
        raise DataError(
            f"{folder} has both {WHOLE} and {INDEX}; readers differ in which one they use",
            hint="delete the one that does not belong to this model",
        )
    if index.exists():
        return _by_index(folder, read_object(inside(folder, INDEX)))
    if whole.exists():
        file = TensorFile.open(inside(folder, WHOLE))
        return dict.fromkeys(file.entries, file)
    shards = sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name))
    if shards:
        raise DataError(
            f"{folder} holds shards ({', '.join(shards[:3])}{' ...' * (len(shards) > 3)}) without their {INDEX}",
            hint=f"the download is incomplete: {INDEX} is missing",
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE)
    if pickled:
        raise UserError(
            f"{folder} holds pickled weights ({', '.join(pickled[:3])}); opening them can run arbitrary code",
            allowed="safetensors",
            hint="convert it once if you trust it: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)",
        )
    raise DataError(f"{folder} has neither {WHOLE} nor {INDEX}")


def _by_index(folder: Path, index: Json) -> dict[str, TensorFile]:
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise DataError(f"{folder / INDEX} has no weight_map", allowed='{"weight_map": {"TENSOR": "FILE"}}')
    opened: dict[str, TensorFile] = {}
    for name, file in places.items():
        if not isinstance(file, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise DataError(
                f"{folder / INDEX} maps {name} to {file!r}", allowed="the plain name of a .safetensors file"
            )
        if file not in opened:
            if not (folder / file).exists():
                raise DataError(
                    f"{folder / INDEX} maps {name} to '{file}', which is not in the folder",
                    hint="the download is incomplete; download the missing shard",
                )
            opened[file] = TensorFile.open(inside(folder, file))
        if name not in opened[file].entries:
            raise DataError(f"{opened[file].path} does not contain {name}, which the index maps to it")
    for file, shard in opened.items():
        for name in shard.entries:
            if places.get(name) != file:
                raise DataError(f"{shard.path} contains {name}, which the index does not map to it")
    return {name: opened[file] for name, file in places.items()}


def _check_headers(folder: Path, config: ModelConfig, rules: list[Rule], files: dict[str, TensorFile]) -> None:
    """Check that the tensors are those of the config, each with its shape and a supported dtype."""
    entries = {name: file.entries[name] for name, file in files.items() if not _DERIVED.search(name)}
    wanted = {name: tuple(tensor.shape) for name, tensor in to_huggingface(rules, meta_weights(config)).items()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    if config.tie_word_embeddings and shapes.get(_HEAD) == (config.vocab_size, config.hidden_size):
        wanted[_HEAD] = shapes[_HEAD]  # the folder of a tied model may contain its head too
    check_tensors(str(folder), wanted, shapes)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise DataError(f"{files[name].path}: tensor {name} is in {entry.dtype}", allowed=", ".join(DTYPES))


def check_tensors(what: str, wanted: dict[str, tuple[int, ...]], actual: dict[str, tuple[int, ...]]) -> None:
    """Raise DataError, which names missing and unexpected tensors and those of another shape."""
    shapes = [
        f"{name} {list(actual[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in actual and actual[name] != shape
    ]
    faults = [
        *_list("missing", (name for name in wanted if name not in actual)),
        *_list("unexpected", (name for name in actual if name not in wanted)),
        *_list("with another shape", shapes),
    ]
    if faults:
        raise DataError(f"the tensors of {what} do not match its config; " + "; ".join(faults))


def _list(label: str, names: Iterable[str], shown: int = 5) -> list[str]:
    every = list(names)
    if not every:
        return []
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return [f"{label}: {', '.join(every[:shown])}{more}"]
