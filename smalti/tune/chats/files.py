"""Reads the rows of the files of tuning data as chats, each with its place, or with what is wrong with it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.config.examples import ExampleFormat, ExamplesConfig
from smalti.data.documents.files import KNOWN_KINDS, Kind, SourceFile, find_files
from smalti.data.documents.rows import Row, jsonl_rows, parquet_rows
from smalti.tune.chats.formats import Chat, detect, read_chat

_READERS: dict[Kind, Callable[[SourceFile], Iterator[Row]]] = {"jsonl": jsonl_rows, "parquet": parquet_rows}


_ONE_LINE = "each line is one JSON object; those of a list: jq -c '.[]' LIST.json > ROWS.jsonl"
_CONVERSIONS = {
    ".json": "jq -c '.[]' FILE.json > FILE.jsonl, for a list of objects",
    ".csv": "python -c 'import pyarrow.csv as c, pyarrow.parquet as p; "
    'p.write_table(c.read_csv("FILE.csv"), "FILE.parquet")\'',
}
"""Suffix of other files -> the command that converts one."""


class ChatRow(NamedTuple):
    """A row of a file."""

    id: str
    """Its ``columns.id``, or file and line."""
    where: str
    """File and line, for messages."""
    chat: Chat | None
    """None if there is a problem."""
    problem: str = ""


def read_chats(config: ExamplesConfig) -> Iterator[ChatRow]:
    """Yield the rows of all files.

    Raises DataError with file and line for a wrong row, unless ``unreadable`` is "drop"; also for a row of another kind
    than those before it (pairs beside conversations, values that only some rows have).
    """
    shape: tuple[int, list[str]] | None = None
    for file in _files(config):
        form: ExampleFormat | None = None if config.format == "auto" else config.format
        for row in _READERS[file.kind](file):
            row_id = f"{file.name}:{row.number}"
            value = _without_none(row.value) if file.kind == "parquet" else row.value
            try:
                if row.problem is not None:
                    raise DataError(row.problem, hint=_hint(row.problem, file) if row.number == 1 else None)
                form = form or detect(value, config.columns)
                chat = read_chat(value, form, config.columns)
                row_id = _id(value, config.columns.id, row_id)
            except DataError as error:
                if config.unreadable == "stop":
                    raise at_row(row.where, error) from error
                yield ChatRow(row_id, row.where, None, error.message)
                continue
            if shape is None:
                shape = _shape(chat)
            if _shape(chat) != shape:
                raise DataError(
                    f"{row.where}: this row has {_text(_shape(chat))}, and earlier ones have {_text(shape)}",
                    allowed="rows of one kind",
                    hint="tune on files of different kinds one after the other",
                )
            yield ChatRow(row_id, row.where, chat)


def _files(config: ExamplesConfig) -> list[SourceFile]:
    return [file for path in config.files for file in files_of(path)]


def files_of(path: str) -> list[SourceFile]:
    """Return the files of rows that ``path`` is, or that are under it. Raises UserError for none."""
    if not store.is_local(path):
        raise UserError(f"tune.examples.files has {path}", allowed="local files and folders", hint="copy it to a disk")
    if not Path(path).exists():
        raise DataError(
            f"tune.examples.files has {path}, which does not exist",
            hint="'tune.examples.files=[FILE.jsonl]' names yours",
        )
    files: list[SourceFile] = []
    try:
        files = [file for file in find_files(path).files if file.kind in _READERS]
    except UserError as error:
        if error.allowed != KNOWN_KINDS:  # a folder that cannot be read, a name that is not UTF-8
            raise
    if not files:
        raise UserError(
            f"{path} holds no rows of tuning data",
            allowed=".jsonl (also .jsonl.gz, .jsonl.zst) and .parquet files, and folders of them",
            hint=_CONVERSIONS.get(Path(path).suffix, "").replace("FILE", str(Path(path).with_suffix(""))) or None,
        )
    return files


def at_row(where: str, error: UserError) -> DataError:
    """Return the error of a row with its place."""
    hint = error.hint or "fix the row, or drop and count such rows: tune.examples.unreadable=drop"
    return DataError(f"{where}: {error.message}", allowed=error.allowed, hint=hint)


def _hint(problem: str, file: SourceFile) -> str | None:
    """Return what to do about a file whose first row cannot be read."""
    if "UTF-" in problem:
        return (
            f"iconv -f {'UTF-16' if 'UTF-16' in problem else 'ISO-8859-1'} -t UTF-8 {file.path} > NEW, for a text file"
        )
    return _ONE_LINE if file.kind == "jsonl" else None


def _id(value: dict[str, Any], column: str | None, otherwise: str) -> str:
    if column is None:
        return otherwise
    if not isinstance(value.get(column), str | int):
        raise DataError(f"'{column}' holds no id", allowed="text or a whole number")
    return str(value[column])


def _shape(chat: Chat) -> tuple[int, list[str]]:
    return len(chat.conversations), sorted(chat.values)


def _text(shape: tuple[int, list[str]]) -> str:
    kind = "a pair of answers" if shape[0] == 2 else "one answer"
    return " with ".join([kind, *shape[1]])


def _without_none(value: Any) -> Any:
    """Remove the keys without a value: Parquet gives every object of a column the keys of all."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value
