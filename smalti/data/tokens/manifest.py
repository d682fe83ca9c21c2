"""The manifest of a folder of token files: what is in it, and the digest that identifies its content.

A folder without a complete manifest is not a data set; a manifest whose digest does not match is an error. Names and
sizes of files follow from a rule, so that a manifest from elsewhere cannot point out of its folder, and one of
12 trillion tokens has 2 MB.
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
    """What a folder of token files holds; written last, so that its presence means that all is there."""

    format: int
    dtype: Literal["u16", "u32"]
    n_tokens: int
    """Tokens in all files, end-of-document tokens included."""
    n_documents: int
    n_text_bytes: int
    """UTF-8 bytes of the documents that became these tokens; 0 where the writer was not told."""
    eod_id: int
    vocab_size: int
    tokenizer_digest: str
    salt: str
    """16 hex digits that go into the checksum of every block, so that blocks of another data set do not pass."""
    file_tokens: int
    """Tokens in every file but the last."""
    sha256: str
    """SHA-256 of the files, one after another, in base64."""
    ids_sha256: str = ""
    """Hex SHA-256 of ``ids.parquet``, the documents' ids; empty where there is none."""
    digest: str = ""
    """Hex SHA-256 over everything above."""

    @property
    def token_bytes(self) -> int:
        """2 or 4."""
        return 2 if self.dtype == "u16" else 4

    @property
    def n_files(self) -> int:
        """Files of tokens."""
        return -(-self.n_tokens // self.file_tokens)

    @property
    def blocks_per_file(self) -> int:
        """Blocks of every file but the last."""
        return layout.n_blocks(self.file_tokens, self.token_bytes)

    @property
    def n_blocks(self) -> int:
        """Blocks of all files."""
        last = self.n_files - 1
        return last * self.blocks_per_file + layout.n_blocks(self.tokens_of_file(last), self.token_bytes)

    def tokens_of_file(self, file: int) -> int:
        """Tokens in a file."""
        return min(self.file_tokens, self.n_tokens - file * self.file_tokens)

    def bytes_of_file(self, file: int) -> int:
        """Size of a file."""
        return layout.file_bytes(self.tokens_of_file(file), self.token_bytes)

    def header_of_file(self, file: int) -> layout.Header:
        """What a file must say about itself."""
        return layout.Header(
            self.token_bytes,
            self.tokens_of_file(file),
            self.eod_id,
            self.tokenizer_digest,
            int(self.salt, 16),
            file,
        )

    def file_digests(self) -> list[str]:
        """Hex SHA-256 of each file."""
        joined = base64.b64decode(self.sha256)
        return [joined[at : at + _SHA256_BYTES].hex() for at in range(0, len(joined), _SHA256_BYTES)]

    def content_digest(self) -> str:
        """The digest that the content asks for."""
        return digest_json({key: value for key, value in asdict(self).items() if key != "digest"})

    def with_digest(self) -> "Manifest":
        """The same with its digest filled in."""
        return replace(self, digest=self.content_digest())

    def save(self, folder: str | Path) -> None:
        """Write ``manifest.json``, whole or not at all."""
        store.write_json(store.join(folder, FILE_NAME), asdict(self))

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read and check the manifest of a folder. Raises DataError when missing, damaged or of another format."""
        files, path = open_files(str(folder)), store.join(folder, FILE_NAME)
        try:
            return cls.parse(read_manifest(files), path)
        finally:
            files.close()

    @classmethod
    def parse(cls, data: bytes, path: str) -> "Manifest":
        """The manifest from the bytes of its file; ``path`` names it in errors. Raises DataError."""
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
    """Name of the file of this number."""
    return f"tokens-{file:05d}.tok"


def join_digests(digests: list[str]) -> str:
    """``Manifest.sha256`` from hex digests."""
    return base64.b64encode(bytes.fromhex("".join(digests))).decode()


def read_manifest(files: Files) -> bytes:
    """The bytes of the manifest, for ``Manifest.parse``. Raises DataError where there is none, or a damaged one."""
    try:
        return files.whole(FILE_NAME, lambda data: Manifest.parse(data, f"{files.where}/{FILE_NAME}"))
    except Damaged:
        raise
    except DataError as error:
        raise DataError(
            f"{files.where} holds no token files: {error.message}",
            hint="write them with 'smalti data tokenize'; a folder whose writing was cut off is written again",
        ) from error


def _checked(raw: Any, path: str) -> Manifest:
    """Types and numbers that the rest of the code relies on."""
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise DataError(f"{path} has format {found!r}", allowed=f"{FORMAT}", hint="run 'smalti data tokenize' again")
    expected = {field.name: int if field.type is int else str for field in fields(Manifest)}
    if set(raw) != set(expected) or any(type(raw[name]) is not kind for name, kind in expected.items()):
        wrong = sorted(set(raw) ^ set(expected)) or [n for n, kind in expected.items() if type(raw[n]) is not kind]
        raise DataError(f"{path} is not a manifest of token files: {wrong[0]} is missing, unknown or of a wrong type")
    m = manifest = Manifest(**raw)
    whole = (
        min(m.n_tokens, m.file_tokens) >= 1
        and min(m.n_documents, m.n_text_bytes) >= 0
        and 0 <= m.eod_id < m.vocab_size
        and m.dtype in ("u16", "u32")
        and re.fullmatch("[0-9a-f]{16}", m.salt) is not None
        and re.fullmatch("[A-Za-z0-9+/]*={0,2}", m.sha256) is not None
        and len(m.sha256) == -(-m.n_files * _SHA256_BYTES // 3) * 4
    )
    if not whole:
        raise DataError(f"{path} does not add up: {manifest.n_tokens:,} tokens are not what its files hold")
    return manifest
