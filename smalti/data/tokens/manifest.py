"""The manifest of a folder of token files: its counts, its hashes, and the digest that identifies its content.

A folder without a complete manifest is not a data set; a manifest whose digest does not match is an error. Names and
sizes of files are computed from their number, so a foreign manifest cannot refer to files outside its folder, and that
of 12 trillion tokens has 2 MB.
"""

import base64
import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json
from smalti.data.fetch import Files, open_files
from smalti.data.fetch.files import Damaged
from smalti.data.tokens import format as layout

FILE_NAME = "manifest.json"
FORMAT = 2
_SHA256_BYTES = 32


@dataclass(frozen=True)
class Manifest:
    """The content of ``manifest.json``, which is written last: a folder that has it is complete."""

    format: int
    dtype: Literal["u16", "u32"]
    n_tokens: int
    """Tokens in all files, including end-of-document tokens."""
    n_documents: int
    n_text_bytes: int
    """UTF-8 bytes of the documents before tokenization; 0 if unknown."""
    eod_id: int
    vocab_size: int
    tokenizer_digest: str
    salt: str
    """16 hex digits in the checksum seed of every block, so that blocks of another data set fail their check."""
    file_tokens: int
    """Tokens in every file but the last."""
    sha256: str
    """SHA-256 of each file, concatenated, in base64."""
    ids_sha256: str = ""
    """Hex SHA-256 of ``ids.parquet``, the documents' ids; empty if there is none."""
    digest: str = ""
    """Hex SHA-256 of all fields above."""

    @property
    def token_bytes(self) -> int:
        """Width of a token: 2 or 4."""
        return 2 if self.dtype == "u16" else 4

    @property
    def n_files(self) -> int:
        """Number of token files."""
        return -(-self.n_tokens // self.file_tokens)

    @property
    def blocks_per_file(self) -> int:
        """Number of blocks in every file but the last."""
        return layout.n_blocks(self.file_tokens, self.token_bytes)

    @property
    def n_blocks(self) -> int:
        """Number of blocks in all files."""
        last = self.n_files - 1
        return last * self.blocks_per_file + layout.n_blocks(self.tokens_of_file(last), self.token_bytes)

    def tokens_of_file(self, file: int) -> int:
        """Return the number of tokens in a file."""
        return min(self.file_tokens, self.n_tokens - file * self.file_tokens)

    def bytes_of_file(self, file: int) -> int:
        """Return the size of a file."""
        return layout.file_bytes(self.tokens_of_file(file), self.token_bytes)

    def header_of_file(self, file: int) -> layout.Header:
        """Return the header that a file must have."""
        return layout.Header(
            self.token_bytes,
            self.tokens_of_file(file),
            self.eod_id,
            self.tokenizer_digest,
            int(self.salt, 16),
            file,
        )

    def file_digests(self) -> list[str]:
        """Return the hex SHA-256 of each file."""
        joined = base64.b64decode(self.sha256)
        return [joined[at : at + _SHA256_BYTES].hex() for at in range(0, len(joined), _SHA256_BYTES)]

    def content_digest(self) -> str:
        """Compute the digest of the other fields."""
        return digest_json({key: value for key, value in asdict(self).items() if key != "digest"})

    def with_digest(self) -> "Manifest":
        """Return a copy with ``digest`` set."""
        return replace(self, digest=self.content_digest())

    def save(self, folder: str | Path) -> None:
        """Write ``manifest.json`` atomically."""
        store.write_json(store.join(folder, FILE_NAME), asdict(self))

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read and check the manifest of a folder. Raises DataError if it is missing, damaged or of another format."""
        files = open_files(str(folder))
        try:
            return cls.parse(read_manifest(files), store.join(folder, FILE_NAME))
        finally:
            files.close()

    @classmethod
    def parse(cls, data: bytes, path: str) -> "Manifest":
        """Parse and check the content of a manifest file. Raises DataError, which names ``path``."""
        try:
            raw = json.loads(data)
        except ValueError as error:
            raise DataError(f"{path} is not valid JSON: {error}") from error
        manifest = _checked(raw, path)
        if manifest.digest != manifest.content_digest():
            raise DataError(
                f"{path} was changed after it was written: its digest does not match its content",
                hint="restore the file, or run 'smalti data tokenize' again",
            )
        return manifest


def file_name(file: int) -> str:
    """Return the name of the file with this number."""
    return f"tokens-{file:05d}.tok"


def join_digests(digests: list[str]) -> str:
    """Convert hex digests to the form of ``Manifest.sha256``."""
    return base64.b64encode(bytes.fromhex("".join(digests))).decode()


def read_manifest(files: Files) -> bytes:
    """Read the content of the manifest, for ``Manifest.parse``. Raises DataError if it is missing or damaged."""
    try:
        return files.whole(FILE_NAME, lambda data: Manifest.parse(data, f"{files.where}/{FILE_NAME}"))
    except Damaged:
        raise
    except DataError as error:
        raise DataError(
            f"{files.where} holds no token files: {error.message}",
            hint="write them with 'smalti data tokenize'; if that was interrupted, run the same command again",
        ) from error


def _checked(raw: Any, path: str) -> Manifest:
    """Check the types and values of all fields."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        version = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise DataError(f"{path} has format {version!r}", allowed=f"{FORMAT}", hint="run 'smalti data tokenize' again")
    expected = {field.name: int if field.type is int else str for field in fields(Manifest)}
    if set(raw) != set(expected) or any(type(raw[name]) is not kind for name, kind in expected.items()):
        wrong = sorted(set(raw) ^ set(expected)) or [n for n, kind in expected.items() if type(raw[n]) is not kind]
        raise DataError(f"{path} is not a manifest of token files: {wrong[0]} is missing, unknown or of a wrong type")
    m = manifest = Manifest(**raw)
    is_consistent = (
        min(m.n_tokens, m.file_tokens) >= 1
        and min(m.n_documents, m.n_text_bytes) >= 0
        and 0 <= m.eod_id < m.vocab_size
        and m.dtype in ("u16", "u32")
        and re.fullmatch("[0-9a-f]{16}", m.salt) is not None
        and re.fullmatch("[A-Za-z0-9+/]*={0,2}", m.sha256) is not None
        and len(m.sha256) == -(-m.n_files * _SHA256_BYTES // 3) * 4
    )
    if not is_consistent:
        raise DataError(
            f"{path} is inconsistent: its counts, salt or hashes do not fit {manifest.n_tokens:,} tokens",
            hint="restore the file, or run 'smalti data tokenize' again",
        )
    return manifest
