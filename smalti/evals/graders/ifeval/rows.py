"""Rows of IFEval's prompts: what a file must have, checked when it is read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base.errors import DataError
from smalti.evals.graders.ifeval.verifiers import Verifier, verifier
from smalti.evals.rows import read_rows

_FIELDS = ("key", "prompt", "instruction_id_list", "kwargs")


@dataclass(frozen=True)
class Row:
    """A prompt with its instructions and the kwargs of each; a DataError names the key of a row that is not right.

    A kwarg that is None is dropped: the published data set has a column for each kwarg of any instruction.
    """

    key: int | str
    prompt: str
    instruction_id_list: list[str]
    kwargs: list[dict[str, Any]]

    def __post_init__(self) -> None:
        where = f"row with key {self.key!r}"
        if not (isinstance(self.key, int | str) and isinstance(self.prompt, str) and self.prompt.strip()):
            raise DataError(f"{where}: key or prompt is not right", allowed="a number or string; a string with text")
        lists = isinstance(self.instruction_id_list, list) and isinstance(self.kwargs, list)
        if not lists or not 0 < len(self.instruction_id_list) == len(self.kwargs):
            raise DataError(
                f"{where}: instruction_id_list and kwargs do not fit each other",
                allowed="two lists of one length, at least one entry each",
            )
        if not all(isinstance(kwargs, Mapping) for kwargs in self.kwargs):
            raise DataError(
                f"{where}: an entry of kwargs is no object", allowed="an object for each, {} where none is needed"
            )
        filled = [{name: value for name, value in kwargs.items() if value is not None} for kwargs in self.kwargs]
        object.__setattr__(self, "kwargs", filled)
        self.verifiers()

    def verifiers(self) -> list[Verifier]:
        """Return the verifier of each instruction."""
        pairs = zip(self.instruction_id_list, self.kwargs, strict=True)
        return [verifier(name, kwargs, f"row with key {self.key!r}") for name, kwargs in pairs]


def load_rows(path: str | Path) -> list[Row]:
    """Read the rows of a JSONL file such as IFEval's ``input_data.jsonl``; a DataError names the file and the line."""
    rows: dict[int | str, Row] = {}
    for number, fields in read_rows(path):
        try:
            row = _row(fields)
            if row.key in rows:
                raise DataError(f"row with key {row.key!r} is there twice", allowed="each key once")
        except DataError as error:
            raise DataError(f"{path}:{number}: {error.message}", allowed=error.allowed, hint=error.hint) from error
        rows[row.key] = row
    return list(rows.values())


def _row(fields: Mapping[str, Any]) -> Row:
    missing = [name for name in _FIELDS if name not in fields]
    if missing:
        raise DataError(f"without {', '.join(missing)}", allowed=f"an object with {', '.join(_FIELDS)}")
    return Row(*(fields[name] for name in _FIELDS))
