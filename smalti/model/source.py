"""A Hugging Face folder that is read: everything in it is checked first, then it is handed over rule by rule.

Guarantees: ``open_source`` reads configs, the index and the headers alone, and what does not fit is refused by
name before any weight is read; ``check_values`` reads all weights once, a piece at a time, before memory is allocated
for them; ``tensors`` holds the tensors of one rule at a time. Pickled weights and code are never opened; no path leads
out of the folder. Local folders only.
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
from smalti.model.described import inside, open_config
from smalti.model.json_file import read_object
from smalti.model.tensor_files import DTYPES, TensorFile
from smalti.model.zoo.family import Rule, Weights
from smalti.model.zoo.fields import Json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_PICKLE = (".bin", ".pt", ".pth", ".ckpt")
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")
"""Tensors that old checkpoints carry although they follow from the config."""

_SHARD = re.compile(r".+-\d+-of-\d+\.safetensors")
_GENERATION = "generation_config.json"
_COMPANIONS = (
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
class Source:
    """A folder whose config and headers have been checked."""

    folder: Path
    raw: Json
    """``config.json``."""
    config: ModelConfig
    rules: list[Rule]
    files: dict[str, TensorFile]
    """Where each of their tensors lies."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by our names."""
        return {name: tuple(tensor.shape) for name, tensor in skeleton(self.config).items()}

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """(our name, whole CPU tensor) of every parameter; ``dtype`` absent keeps each as it is in the files."""
        for rule in self.rules:
            ours = rule.to_ours([self.files[name].read(name) for name in rule.theirs])
            while ours:
                yield rule.ours[-len(ours)], ours.pop(0) if dtype is None else ours.pop(0).to(dtype)

    def check_values(self, part: int = 0, of: int = 1) -> None:
        """DataError where a weight is not finite, or a tied head is not the embedding; every ``of``-th tensor only."""
        for name in list(self.files)[part::of]:
            if not _DERIVED.search(name):
                self.files[name].check_finite(name)
        if part == 0 and self.config.tie_word_embeddings and _HEAD in self.files:
            embed = next(rule.theirs[0] for rule in self.rules if rule.ours == ("embed.weight",))
            if not torch.equal(self.files[embed].read(embed), self.files[_HEAD].read(_HEAD)):
                raise DataError(f"{self.folder} says tie_word_embeddings, but its {_HEAD} differs from {embed}")


def companions(folder: Path) -> dict[str, bytes]:
    """What belongs to a model beside its weights, by name: tokenizer, chat templates, ``generation_config.json``."""
    templates = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    names = [*_COMPANIONS, *(f"{_MORE_TEMPLATES}/{path.name}" for path in templates)]
    return {name: inside(folder, name).read_bytes() for name in names if (folder / name).is_file()}


def open_source(folder: str | Path) -> Source:
    """Check a folder's config, index and headers; UserError or DataError says what cannot be read, and where."""
    described = open_config(folder)
    path, raw, family, config = described.folder, described.raw, described.family, described.config
    _check_ends("config.json", path, raw, config.vocab_size)
    if (path / _GENERATION).exists():
        _check_ends(_GENERATION, path, read_object(inside(path, _GENERATION)), config.vocab_size)
    files = _locate(path)
    if config.num_hidden_layers > len(files):
        raise DataError(f"{path}/config.json asks for {config.num_hidden_layers} layers; it has {len(files)} tensors")
    rules = family.rules(config)
    _check_headers(path, config, rules, files)
    return Source(path, raw, config, rules, files)


def skeleton(config: ModelConfig) -> Weights:
    """The tensors of ``Decoder(config)`` on the meta device."""
    try:
        with torch.device("meta"):
            return Decoder(config).state_dict()
    except (RuntimeError, OverflowError) as error:
        raise DataError(f"a model of these sizes cannot be built: {error}") from error


def theirs(rules: list[Rule], weights: Weights) -> Weights:
    """All of ``weights`` under their names: for the meta device, where they cost nothing."""
    found: Weights = {}
    for rule in rules:
        found |= zip(rule.theirs, rule.to_theirs([weights[name] for name in rule.ours]), strict=True)
    return found


def _check_ends(name: str, folder: Path, raw: Json, vocab_size: int) -> None:
    """DataError for a token that begins or ends a text and is none of the model's; several may end one."""
    for key, many in (("bos_token_id", False), ("eos_token_id", True)):
        given = raw.get(key)
        ids = given if many and isinstance(given, list) else [] if given is None else [given]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            raise DataError(
                f"{folder / name} has {key}={repr(given)[:60]}",
                allowed=f"null or 0 to {vocab_size - 1} (vocab_size={vocab_size})" + ", or a list of such" * many,
                hint="write the id that tokenizer.json gives that token, or null where the model has none",
            )


def _locate(folder: Path) -> dict[str, TensorFile]:
    """Each tensor's file, by the index or from the single file's header."""
    index, whole = folder / INDEX, folder / WHOLE
    if index.exists() and whole.exists():
        raise DataError(
            f"{folder} has both {WHOLE} and {INDEX}; readers differ in which one they take",
            hint="delete the one that is not of this model",
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
            hint=f"the download is incomplete; bring {INDEX} from where the shards are from",
        )
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE)
    if pickled:
        raise UserError(
            f"{folder} holds pickled weights ({', '.join(pickled[:3])}); opening them can run any code",
            allowed="safetensors",
            hint="convert it once where it is trusted: AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)",
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
                f"{folder / INDEX} places {name} in {file!r}", allowed="the plain name of a .safetensors file"
            )
        if file not in opened:
            if not (folder / file).exists():
                raise DataError(
                    f"{folder / INDEX} places {name} in '{file}', which is not in the folder",
                    hint="the download is incomplete; bring the missing shard",
                )
            opened[file] = TensorFile.open(inside(folder, file))
        if name not in opened[file].entries:
            raise DataError(f"{opened[file].path} does not hold {name}, although the index says so")
    for file, held in opened.items():
        for name in held.entries:
            if places.get(name) != file:
                raise DataError(f"{held.path} holds {name}, which the index does not place there")
    return {name: opened[file] for name, file in places.items()}


def _check_headers(folder: Path, config: ModelConfig, rules: list[Rule], files: dict[str, TensorFile]) -> None:
    """The tensors must be those that the config asks for, each of its shape and of a dtype that we read."""
    entries = {name: file.entries[name] for name, file in files.items() if not _DERIVED.search(name)}
    wanted = {name: tuple(tensor.shape) for name, tensor in theirs(rules, skeleton(config)).items()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    if config.tie_word_embeddings and shapes.get(_HEAD) == (config.vocab_size, config.hidden_size):
        wanted[_HEAD] = shapes[_HEAD]  # a tied model may carry its head too
    check_tensors(str(folder), wanted, shapes)
    for name, entry in entries.items():
        if entry.dtype not in DTYPES:
            raise DataError(f"{files[name].path}: tensor {name} is in {entry.dtype}", allowed=", ".join(DTYPES))


def check_tensors(what: str, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    """DataError that names missing and unexpected tensors, and those of another shape."""
    shapes = [
        f"{name} {list(found[name])} instead of {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    faults = [
        *_list("missing", (name for name in wanted if name not in found)),
        *_list("unexpected", (name for name in found if name not in wanted)),
        *_list("of another shape", shapes),
    ]
    if faults:
        raise DataError(f"the tensors of {what} do not fit its config; " + "; ".join(faults))


def _list(label: str, names: Iterable[str], shown: int = 5) -> list[str]:
    every = list(names)
    if not every:
        return []
    more = f" and {len(every) - shown} more" if len(every) > shown else ""
    return [f"{label}: {', '.join(every[:shown])}{more}"]
