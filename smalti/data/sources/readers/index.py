"""The input of a reader (``SourceFolder``), and the index that one rank reads and all ranks open the source from."""

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smalti.base.errors import DataError
from smalti.data.fetch import Files

if TYPE_CHECKING:  # importing pydantic would slow the start of a rank
    from smalti.config.data import SourceConfig

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SourceFolder:
    """The config section of a source, and the files of its folder."""

    config: "SourceConfig"
    files: Files
    file: str = ""
    """The file that ``path`` names; empty if it names the folder."""
    index_file: bytes = b""
    """Content of the format's index file, for ``read_index``."""
    tokenizer: str | None = None
    """``data.tokenizer``, which the text reader needs."""


@dataclass(frozen=True)
class Index:
    """Everything needed to open a source; the rank that read it sends it to the others as bytes."""

    format: str
    """Name of the format."""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    parts: dict[str, bytes] = field(default_factory=dict)
    """Name -> content of a file or table."""

    def to_bytes(self) -> bytes:
        """Serialize; equal indexes give equal bytes."""
        sizes = {name: len(data) for name, data in self.parts.items()}
        head = json.dumps({"form": self.format, "facts": self.facts, "parts": sizes}, sort_keys=True).encode()
        return b"".join((_LENGTH.pack(len(head)), head, *(self.parts[name] for name in sorted(self.parts))))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Index":
        """Return the index that ``to_bytes`` serialized. Raises DataError for other bytes."""
        try:
            (length,) = _LENGTH.unpack_from(data)
            start = _LENGTH.size + length
            head = json.loads(data[_LENGTH.size : start])
            parts = {}
            for name, size in sorted(head["parts"].items()):
                parts[name] = data[start : start + size]
                start += size
            if start != len(data):
                raise ValueError(f"{len(data)} bytes, {start} expected")
            return cls(head["form"], head["facts"], parts)
        except (struct.error, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"these bytes are not the index of a source: {error}", hint="pass read_index's result"
            ) from error


def parsed_json(data: bytes, path: str) -> Any:
    """Parse a JSON file. Raises DataError naming ``path``."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint="copy it again") from error
