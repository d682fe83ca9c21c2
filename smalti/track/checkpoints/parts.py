"""The parts of a checkpoint's file that are copied: read from the disk, with their digests."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from smalti.base.errors import DataError
from smalti.base.hashing import xxh3_stream
from smalti.track.checkpoints.manifest import Entry


class Part(NamedTuple):
    """A part of a file, read from the disk."""

    file: str
    number: int
    data: bytes


def read_parts(root: Path, entry: Entry, part_bytes: int) -> Iterator[Part]:
    """Yield the parts of a file. Raises DataError at its end where they are not what the manifest lists."""
    whole = xxh3_stream() if "xxh3" in entry else hashlib.sha256()
    try:
        with open(root / entry["name"], "rb") as file:
            number = 0
            while data := file.read(part_bytes):
                whole.update(data)
                yield Part(entry["name"], number, data)
                number += 1
    except FileNotFoundError as error:
        raise DataError(f"{root / entry['name']} was deleted while it was copied") from error
    if whole.hexdigest() != (entry.get("xxh3") or entry["sha256"]):
        raise DataError(
            f"{root / entry['name']} does not match its digest, and is not copied",
            hint="the disk has changed it: check the disk, and 'smalti runs checkpoints'",
        )


def part_digest(part: bytes) -> str:
    """Return the XXH3-128 of a part."""
    digest = xxh3_stream()
    digest.update(part)
    return digest.hexdigest()
