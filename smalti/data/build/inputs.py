"""The files of the inputs, grouped into shards that stay the same when other files are added."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from smalti.base import cloud, store
from smalti.base.errors import RetryableError, UserError, missing_extra
from smalti.base.hashing import digest_json, xxh3, xxh3_file
from smalti.base.progress import Progress
from smalti.config.build import BuildInput
from smalti.data.build.extract.repository import with_licences
from smalti.data.documents.files import FoundFiles, Kind, SourceFile, find_files

_SHARD_BYTES = 16 << 20
_CUT_ONE_IN = 512
_PACKAGES: dict[Kind, str] = {"warc": "warcio", "pdf": "pypdfium2"}
"""Packages of the extra ``formats`` on which a text depends."""


@dataclass(frozen=True)
class InputShard:
    """Files of one source that are extracted together; a file larger than a shard is one of its own."""

    source: str
    files: tuple[SourceFile, ...]
    digest: str
    """Of the names and the contents."""
    file_digests: tuple[str, ...]
    """Of the content of each file, when the shard was made."""

    @property
    def n_bytes(self) -> int:
        """Size of the files."""
        return sum(file.n_bytes for file in self.files)


def find_inputs(inputs: tuple[BuildInput, ...]) -> dict[str, FoundFiles]:
    """Return source -> its files, sorted by name.

    Raises:
        DataError: an input is missing or has no documents.
        UserError: the package that reads a file is not installed.
    """
    sources = {item.source: find_files(item.path, item.include, for_build=True) for item in inputs}
    for item in inputs:
        if item.code is not None:
            if not store.is_local(item.path):
                raise UserError(f"code: {item.path} is a URL", allowed="a local folder", hint="copy it here first")
            files = sources[item.source]
            sources[item.source] = replace(files, files=with_licences(item.path, files.files))
    for kind, package in _PACKAGES.items():
        first = next((file for files in sources.values() for file in files.files if file.kind == kind), None)
        if first is not None and find_spec(package) is None:
            raise missing_extra(package, "formats", f"reading {first.path}")
    return dict(sorted(sources.items()))


def input_shards(sources: dict[str, FoundFiles], progress: Progress) -> list[InputShard]:
    """Group files, in order; each file is read once for its digest. ``progress`` counts bytes."""
    shards: list[InputShard] = []
    total = sum(file.n_bytes for files in sources.values() for file in files.files)
    done = 0
    for source, files in sources.items():
        group: list[SourceFile] = []
        digests: list[list[str]] = []
        size = 0
        for file in files.files:
            group.append(file)
            digests.append([file.name, file_digest(file), *([file.licence] if file.licence else [])])
            size += file.n_bytes
            done += file.n_bytes
            progress("looking for changes", done, total)
            # A name ends a group also by chance, so that an added file changes its own group only.
            if size >= _SHARD_BYTES or xxh3(file.name.encode()) % _CUT_ONE_IN == 0:
                shards.append(_shard(source, group, digests))
                group, digests, size = [], [], 0
        if group:
            shards.append(_shard(source, group, digests))
    return shards


def _shard(source: str, group: list[SourceFile], digests: list[list[str]]) -> InputShard:
    packages = sorted({_PACKAGES[file.kind] for file in group if file.kind in _PACKAGES})
    content = [source, digests, *([name, version(name)] for name in ("charset-normalizer", *packages))]
    return InputShard(source, tuple(group), digest_json(content), tuple(digest[1] for digest in digests))


@contextmanager
def local_files(files: Sequence[SourceFile], beside: Path) -> Iterator[Iterator[SourceFile]]:
    """Yield the files, those of stores one after the other as local copies, which are removed; ``beside``: this path.

    Raises RetryableError if one is not of the version that was listed.
    """
    with TemporaryDirectory(prefix=f"{beside.name}.", suffix=".tmp", dir=beside.parent) as folder:
        yield (file if file.version is None else _downloaded(file, Path(folder)) for file in files)


def _downloaded(file: SourceFile, folder: Path) -> SourceFile:
    to = folder / "file"
    try:
        version = cloud.download(file.path, to)
    except FileNotFoundError:
        version = "none"
    if version != file.version:
        raise RetryableError(
            f"{file.path} changed after it was listed", hint="run the same command again when nothing writes to it"
        )
    return replace(file, path=str(to))


def file_digest(file: SourceFile) -> str:
    """Return the digest of the content, or of the version in a store; of a file that cannot be read, the reason."""
    if file.version is not None:
        return digest_json([file.version, file.n_bytes])
    try:
        return xxh3_file(file.path)
    except OSError as error:
        return f"{os.strerror(error.errno or 0)}"  # the extraction records why it cannot be read
