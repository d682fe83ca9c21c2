"""The base of a run that trains adapters: where its weights are, and the digest that identifies them.

torch.distributed.checkpoint, a fifth of what serving would import, is imported only where a checkpoint is read.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from smalti.base.errors import DataError
from smalti.base.hashing import digest_json, sha256_file
from smalti.model.huggingface import ModelFolder, open_folder


def is_model_folder(path: str | Path) -> bool:
    """Return whether a path is a Hugging Face folder."""
    return (Path(path) / "config.json").is_file()


def identity(path: str | Path, init_from: str) -> dict[str, str]:
    """Return the identity of the weights in a Hugging Face folder, or in a checkpoint, for records.

    The digest is over names and contents of their files. That of a checkpoint is another than that of its export.
    """
    if is_model_folder(path):
        files = {file.name: sha256_file(file) for file in sorted(Path(path).glob("*.safetensors"))}
        return {"init_from": init_from, "kind": "folder", "sha256": digest_json(files)}
    return {"init_from": init_from, "kind": "checkpoint", "sha256": sha256_file(Path(path) / "manifest.json")}


def require_same(recorded: Mapping[str, str], base: Mapping[str, str], subject: str) -> None:
    """Raise DataError if ``subject`` ("the adapters in FOLDER were") trained beside other weights than ``base``.

    A model folder is another base than the checkpoint that it was exported from.
    """
    if recorded["sha256"] != base["sha256"]:
        before = recorded["init_from"]
        again = "restore them" if before == base["init_from"] else f"name {before} as the base"
        raise DataError(
            f"{subject} trained beside other weights than those of {base['init_from']}: the digest "
            f"of their files is {base['sha256'][:12]}, not {recorded['sha256'][:12]}",
            allowed=f"the weights with which they were trained ({before})",
            hint=f"{again}, or train anew beside these: name=NEW_NAME",
        )


def find(init_from: str) -> str:
    """Return the Hugging Face folder or checkpoint that ``init_from`` means; of a run its newest checkpoint."""
    if is_model_folder(init_from) or (Path(init_from) / "train_state.json").is_file():
        return init_from
    from smalti.distributed.checkpoint import checkpoint

    newest = checkpoint.newest(f"{init_from}/checkpoints")
    if newest is None:
        raise DataError(
            f"the base of the adapters, {init_from}, is not there", hint="restore it, or give its new place"
        )
    return newest


def weights(path: str) -> Mapping[str, Tensor]:
    """Return the weights of ``find``, by our names, each read on access."""
    if is_model_folder(path):
        return FolderWeights(open_folder(path))
    from smalti.distributed.checkpoint import checkpoint

    return checkpoint.StoredModel(path)


class FolderWeights(Mapping[str, Tensor]):
    """The weights in a Hugging Face folder, by our names, each read on access."""

    def __init__(self, folder: ModelFolder) -> None:
        self._folder = folder
        self._rules = {name: rule for rule in folder.rules for name in rule.ours}

    def __getitem__(self, name: str) -> Tensor:
        rule = self._rules[name]
        ours = rule.to_ours([self._folder.files[theirs].read(theirs) for theirs in rule.theirs])
        return ours[rule.ours.index(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)
