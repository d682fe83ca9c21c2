"""What a reader is given, and what it reads of a folder on one rank, for all ranks to open the source from."""

import json
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from smalti.base.errors import DataError
from smalti.data.fetch import Files

if TYPE_CHECKING:  # the start of a rank is measured: pydantic is not needed to open a source
    from smalti.config.data import SourceConfig

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class SourceFolder:
    """The section of a source, and the files of its folder."""

    config: "SourceConfig"
    files: Files
    file: str = ""
    """The one file of the folder that ``path`` names; empty where it names the folder."""
    index_file: bytes = b""
    """Content of the format's index file, for ``read_index``."""
    tokenizer: str | None = None
    """``data.tokenizer``, for text."""


@dataclass(frozen=True)
class Index:
    """Passed as bytes from the rank that read it to the others."""

    form: str
    """Name of the format."""
    facts: dict[str, Any] = field(default_factory=dict)
    """JSON values."""
    parts: dict[str, bytes] = field(default_factory=dict)
    """Files and tables as they are."""

    def pack(self) -> bytes:
        """As bytes; equal indexes give equal bytes."""
        sizes = {name: len(data) for name, data in self.parts.items()}
        head = json.dumps({"form": self.form, "facts": self.facts, "parts": sizes}, sort_keys=True).encode()
        return b"".join((_LENGTH.pack(len(head)), head, *(self.parts[name] for name in sorted(self.parts))))

    @classmethod
    def unpack(cls, data: bytes) -> "Index":
        """Back from ``pack``; raises DataError for anything else."""
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
            raise DataError(f"this is no index of a source: {error}", hint="give what read_index returned") from error


def parsed_json(data: bytes, path: str) -> Any:
    """The value of a JSON file that others wrote."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint="copy it again") from error
