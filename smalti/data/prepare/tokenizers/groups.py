"""The documents on which tokenizers are compared, in groups: an input each, or a language each."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from smalti.base.errors import DataError, UserError
from smalti.base.progress import Progress
from smalti.base.rng import derive_key
from smalti.data.documents.files import SourceFile, find_files
from smalti.data.documents.readers import ReadOptions, read_tasks

GroupOf = Callable[[str, str], str]
"""File name and text of a document -> its group."""

_MAX_DOCUMENT_BYTES = 1_000_000
_WITHOUT_BLANKS = re.compile(
    "[\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f]+"
)
"""Thai, Lao, Burmese, Khmer, kana and Han."""


@dataclass(frozen=True)
class Texts:
    """Some of the documents of a group."""

    group: str
    texts: list[str]


@dataclass(frozen=True)
class Input:
    """A group of files."""

    name: str
    files: tuple[SourceFile, ...]


def inputs_of(given: Sequence[str]) -> list[Input]:
    """Return the groups of ``PATH`` or ``NAME=PATH``: one each, or one for each subfolder of a folder of folders.

    Raises:
        DataError: a path does not exist or holds no documents.
        UserError: two groups have the same name.
    """
    groups: list[Input] = []
    for item in given:
        name, path = named(item)
        for part in _parts(path):
            last = re.sub(r"(?<=.)\..*", "", os.path.basename(os.path.normpath(part)))
            label = last if name is None else name if part == path else f"{name}/{last}"
            groups.append(Input(label, find_files(part).files))
    names = [each.name for each in groups]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"two groups are named '{twice}'", hint="name them: --on A=PATH --on B=PATH")
    return groups


def named(item: str) -> tuple[str | None, str]:
    """Split ``NAME=PATH``; the name is None where there is none."""
    name, equals, path = item.partition("=")
    return (name, path) if equals and name and "/" not in name and not os.path.exists(item) else (None, item)


def read_groups(
    inputs: Sequence[Input],
    *,
    text_field: str,
    limit_bytes: int,
    group_of: GroupOf | None,
    progress: Progress,
) -> Iterator[Texts]:
    """Yield the documents, in order; of an input of more than ``limit_bytes`` a sample of about that size.

    The sample depends on the ids of the documents only. ``group_of`` is for groups other than the inputs.
    """
    options = ReadOptions(text_field, max_document_bytes=_MAX_DOCUMENT_BYTES)
    total, done = sum(file.n_bytes for each in inputs for file in each.files), 0
    for each in inputs:
        n_bytes = sum(file.n_bytes for file in each.files)
        limit = int(min(1.0, limit_bytes / max(n_bytes, 1)) * 2.0**63)
        for task in read_tasks(each.files, options):
            for batch in task.batches():
                ids, texts = batch.column("id").to_pylist(), batch.column("text").to_pylist()
                by_group: dict[str, list[str]] = {}
                for document_id, text in zip(ids, texts, strict=True):
                    if text and derive_key("sample", document_id) < limit:
                        group = each.name if group_of is None else group_of(_file_name(document_id), text)
                        by_group.setdefault(group, []).append(text)
                yield from (Texts(group, documents) for group, documents in by_group.items())
            done += sum(file.n_bytes for file in task.files)
            progress("comparing", done, total)


def count_units(text: str) -> tuple[int, int, int]:
    """Return (words between blanks, characters that are no blanks, those of them in scripts without blanks)."""
    words = text.split()
    without = sum(map(len, _WITHOUT_BLANKS.findall(text)))
    return len(words), sum(map(len, words)), without


def _parts(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    entries = sorted(entry.path for entry in os.scandir(path) if not entry.name.startswith("."))
    if not entries:
        raise DataError(f"{path} is empty", hint="name a folder with documents")
    return entries if all(os.path.isdir(entry) for entry in entries) else [path]


def _file_name(document_id: str) -> str:
    """Return the name of the file that an id begins with."""
    return re.sub(r"(:\d+)?(#\d+)?$", "", document_id)
