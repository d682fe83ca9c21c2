"""The manifest of a folder of token files: what is in it, and the digest that names its content.

Promises: a folder without a complete manifest is not a data set; a manifest whose digest does not match its content is
refused; file names are plain names inside the folder (a manifest may come from elsewhere, so it is not trusted).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json

FILE_NAME = "manifest.json"
FORMAT = 1


@dataclass(frozen=True)
class TokenFile:
    """One file of a data set."""

    name: str
    n_tokens: int
    n_bytes: int
    digest: str
    """Hex SHA-256 of the whole file."""
    checksums: str
    """Hex XXH3-64 of the table of block checksums: binds every block to this manifest without reading the file."""


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
    files: tuple[TokenFile, ...]
    digest: str = ""
    """Hex SHA-256 over everything above."""

    def content_digest(self) -> str:
        """The digest that the content asks for."""
        return digest_json({key: value for key, value in asdict(self).items() if key != "digest"})

    def save(self, folder: str | Path) -> None:
        """Write ``manifest.json``, whole or not at all."""
        store.write_json(store.join(folder, FILE_NAME), asdict(self))

    @classmethod
    def load(cls, folder: str | Path) -> "Manifest":
        """Read and check the manifest of a folder. Raises DataError when missing, damaged or of another format."""
        path = store.join(folder, FILE_NAME)
        if not store.exists(path):
            raise DataError(
                f"{folder} holds no token files: {FILE_NAME} is missing",
                hint="write them with 'smalti data tokenize'; a folder whose writing was cut off is written again",
            )
        raw = store.read_json(path)
        manifest = _parse(raw, path)
        if manifest.digest != manifest.content_digest():
            raise DataError(
                f"{path} was changed after it was written: its digest does not match its content",
                hint="restore the file, or run 'smalti data tokenize' again",
            )
        if sum(file.n_tokens for file in manifest.files) != manifest.n_tokens or manifest.n_tokens < 1:
            raise DataError(f"{path} lists {manifest.n_tokens:,} tokens, which its files do not add up to")
        return manifest


def _parse(raw: Any, path: str) -> Manifest:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else type(raw).__name__
        raise DataError(f"{path} has format {found!r}", allowed=f"{FORMAT}", hint="run 'smalti data tokenize' again")
    try:
        files = tuple(TokenFile(**file) for file in raw["files"])
        manifest = Manifest(**{**raw, "files": files})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path} is not a manifest of token files: {error}") from error
    for file in files:
        if file.name != Path(file.name).name or file.name in ("", ".", ".."):
            raise DataError(f"{path} lists the file '{file.name}'", allowed="plain names of files inside the folder")
    return manifest
