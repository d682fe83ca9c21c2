"""The table of token formats: how a format is detected, and which options of a source it takes.

A new format is its name and its row here, and its reader: ``smalti/data/sources/readers/NAME.py`` with the functions of
``Reader`` (``smalti/data/sources/open.py``).
"""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["smalti", "examples", "mds", "megatron", "raw", "litdata", "text"]


@dataclass(frozen=True)
class TokenFormat:
    """A token format. It has an index file, or its files have suffixes."""

    options: tuple[str, ...] = ()
    """Fields of ``SourceConfig`` that it takes. With ``files``, ``path`` may also be a single file."""
    index_file: str = ""
    """The file in its folder that lists the others."""
    index_key: str = ""
    """The key by which an index file of this format differs from those of others with the same name."""
    suffixes: tuple[str, ...] = ()
    """Suffixes of the names of its files."""


FORMATS: dict[FormatName, TokenFormat] = {
    "smalti": TokenFormat(index_file="manifest.json"),
    "examples": TokenFormat(index_file="examples.json"),
    "mds": TokenFormat(("column", "dtype", "eod_id", "vocab_size"), "index.json", "shards"),
    "megatron": TokenFormat(("files", "eod_id", "vocab_size"), suffixes=(".idx",)),
    "raw": TokenFormat(("dtype", "files", "eod_id", "vocab_size", "document_ends"), suffixes=(".npy", ".bin", ".ds")),
    "litdata": TokenFormat(("eod_id", "vocab_size"), "index.json", "chunks"),
    "text": TokenFormat(("column", "files"), suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".parquet")),
}
