"""How a checkpoint is stored in an object store.

    step-00001000/shards/00000.safetensors.00000-9f86d081884c7d65   a part of a file: name, number, start of its XXH3
    step-00001000/index-2c26b46b68ffc68f.json                       the files: sizes, digests, those of parts; config
    step-00001000/COMPLETE                                          written last, if absent: the digest of the index

The names hold digests, so two writers of one step never overwrite each other, and a part that exists need not be sent
again. A part is one request: no upload in several requests is left behind, invisible and billed, by a process that was
killed (docs/decisions/0022-parts-are-objects.md).
"""

import json
from dataclasses import dataclass
from typing import Any

from smalti.base.errors import DataError
from smalti.base.hashing import sha256_bytes

FORMAT = 1
MARK = "COMPLETE"
PART_BYTES = 32 << 20
"""Size of a part: about a second of a fast connection, and few enough objects (31,000 in 1 TB)."""


class Damaged(DataError):
    """A copy of a checkpoint lacks an object, or has one with other bytes than were written."""


@dataclass(frozen=True)
class File:
    """A file of a checkpoint and the digests of its parts."""

    name: str
    bytes: int
    digest: str
    """That of the manifest."""
    parts: tuple[str, ...]
    """XXH3-128 of each part."""

    def part_names(self) -> list[str]:
        """Return the names of its objects, below the folder of the step."""
        return [part_name(self.name, number, digest) for number, digest in enumerate(self.parts)]


@dataclass(frozen=True)
class Index:
    """The files of a copy."""

    files: tuple[File, ...]
    config: str | None
    """``config.yaml`` of the run."""
    part_bytes: int

    def sizes(self) -> dict[str, int]:
        """Return the size of each part by its name."""
        return {
            name: min(self.part_bytes, file.bytes - number * self.part_bytes)
            for file in self.files
            for number, name in enumerate(file.part_names())
        }

    def same_files(self, other: "Index") -> bool:
        """Return whether both are copies of the same files."""
        return {(file.name, file.digest) for file in self.files} == {(file.name, file.digest) for file in other.files}

    def to_bytes(self) -> bytes:
        """Return its JSON; equal indexes are equal bytes."""
        files = [
            {"name": file.name, "bytes": file.bytes, "digest": file.digest, "parts": list(file.parts)}
            for file in self.files
        ]
        value = {"format": FORMAT, "part_bytes": self.part_bytes, "config": self.config, "files": files}
        return (json.dumps(value, indent=1) + "\n").encode()


@dataclass(frozen=True)
class Mark:
    """The contents of ``COMPLETE``."""

    index: str
    """Name of the index object."""
    sha256: str
    """Digest of the index."""
    writer: str
    """Host, process and time of the writer, for messages."""

    def to_bytes(self) -> bytes:
        """Return its JSON."""
        value = {"format": FORMAT, "index": self.index, "sha256": self.sha256, "writer": self.writer}
        return (json.dumps(value) + "\n").encode()


def part_name(file: str, number: int, digest: str) -> str:
    """Return the name of the object of a part."""
    return f"{file}.{number:05d}-{digest[:16]}"


def index_name(data: bytes) -> str:
    """Return the name of the object of an index."""
    return f"index-{sha256_bytes(data)[:16]}.json"


def parse_mark(place: str, data: bytes) -> Mark:
    """Return the contents of ``COMPLETE``. Raises Damaged, or DataError for a format of another version."""
    value = _parsed(f"{place}/{MARK}", data, "index", "sha256", "writer")
    return Mark(value["index"], value["sha256"], value["writer"])


def parse_index(place: str, mark: Mark, data: bytes) -> Index:
    """Return the index that ``mark`` names. Raises Damaged, or DataError for a format of another version."""
    where = f"{place}/{mark.index}"
    if sha256_bytes(data) != mark.sha256:
        raise Damaged(f"{where} does not match its digest in {MARK}")
    value = _parsed(where, data, "files", "part_bytes", "config")
    files = [File(entry["name"], entry["bytes"], entry["digest"], tuple(entry["parts"])) for entry in value["files"]]
    for file in files:
        if file.name.startswith("/") or ".." in file.name.split("/"):
            raise Damaged(f"{where} has a file outside the checkpoint: {file.name}")
    return Index(tuple(files), value["config"], value["part_bytes"])


def _parsed(where: str, data: bytes, *keys: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
        if value["format"] != FORMAT:
            raise DataError(
                f"{where} has format {value['format']}; this version of Smalti reads {FORMAT}",
                hint="use the version that wrote it",
            )
        return {key: value[key] for key in keys}
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{where} is not valid: {type(error).__name__}: {error}") from error
