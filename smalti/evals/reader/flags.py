"""Flags of items: a JSON-lines list that is only appended to, so that git keeps its versions.

A line is ``{"task", "id" or "index", "digest", "flag", "note", "time", "version"}``. The last line of an item counts;
``"flag": null`` removes its flag. ``digest`` is of prompt and right answers: a flag whose item has changed is reported
and not applied. A line with ``answer-acceptable`` has the ``answer`` too, and applies to that answer alone; several
such lines in a row accept several answers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smalti.base.clock import utc_text
from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_bytes
from smalti.evals.samples import Sample
from smalti.track.line_file import LineFile

FLAGS = {
    "label-wrong": "the right answer of the data is wrong: the item is excluded",
    "ambiguous": "several answers are right, or none: the item is excluded",
    "answer-acceptable": "the model's answer is right too: it counts as correct",
}
"""Flag -> what it means and does to the score."""
VERSION = 1
"""Of the form of a line."""
Line = Mapping[str, Any]
_Item = tuple[str, str, str | int]


@dataclass(frozen=True)
class Flag:
    """What a person has said of an item."""

    flag: str
    note: str = ""
    answers: tuple[str, ...] = ()
    """The acceptable answers."""

    @property
    def excludes(self) -> bool:
        """Whether the item is left out of the score."""
        return self.flag != "answer-acceptable"

    def accepts(self, sample: Sample) -> bool:
        """Return whether the answer of a sample, of either model, counts as correct."""
        return not self.excludes and sample.answer in self.answers


@dataclass(frozen=True)
class Applied:
    """The flags of a list that apply to some samples, by ``Sample.name``."""

    flags: Mapping[str, Flag]
    changed: tuple[str, ...] = ()
    """Names of flagged items whose prompt or right answers differ from those that were flagged."""


def default_path(folder: Path) -> Path:
    """Return ``evals/flags.jsonl`` of the run that a results folder belongs to; else a file in the folder itself."""
    parents = (*folder.parents, *folder.absolute().parents)
    evals = next((parent for parent in parents if parent.name == "evals"), folder)
    return evals / "flags.jsonl"


def list_version(path: Path) -> str | None:
    """Return the first digits of the SHA-256 of the list, which name its version; None without a list."""
    return sha256_bytes(path.read_bytes())[:12] if path.is_file() else None


def read_flags(path: Path) -> list[Line]:
    """Return the lines of a list; none where there is no file. Raises DataError for a line that is no flag."""
    return parse_flags(path.read_text(encoding="utf-8", errors="replace"), str(path)) if path.is_file() else []


def parse_flags(text: str, source: str) -> list[Line]:
    """Return the lines of ``text``. Raises DataError, with the line's number in ``source``, for one that is no flag."""
    lines: list[Line] = []
    for number, row in enumerate(text.split("\n"), 1):
        if row.strip():
            try:
                line = json.loads(row)
            except ValueError:
                line = None
            if problem := _problem(line):
                raise DataError(f"{source}:{number}: {problem}", allowed=_ALLOWED, hint="correct or remove the line")
            lines.append(line)
    return lines


_ALLOWED = '{"task", "id" or "index", "digest", "flag", "note", "time", "version"} in JSON, one object a line'


def _problem(line: Any) -> str | None:
    if not isinstance(line, dict):
        return "not a JSON object"
    if line.get("version") != VERSION:
        return f"version {line.get('version')!r} is not known"
    if not isinstance(line.get("id"), str) and not isinstance(line.get("index"), int):
        return "neither id nor index"
    missing = next((key for key in ("task", "digest", "time") if not isinstance(line.get(key), str)), None)
    if missing:
        return f"no {missing}"
    if line.get("flag") is not None and line["flag"] not in FLAGS:
        return f"flag {line['flag']!r} is not one of {', '.join(FLAGS)}, null"
    if line.get("flag") == "answer-acceptable" and not isinstance(line.get("answer"), str):
        return "answer-acceptable without the answer"
    return None


def line_of(sample: Sample, flag: str | None, note: str = "") -> Line:
    """Return the line that flags a sample, or removes its flag. Raises UserError where the flag has no meaning."""
    if flag is not None and flag not in FLAGS:
        raise UserError(f"flag '{flag}' is not known", allowed=", ".join((*FLAGS, "none")))
    if flag == "answer-acceptable" and (sample.correct is not False or sample.answer is None):
        raise UserError(f"{sample.name} has no wrong answer to accept", allowed="label-wrong, ambiguous, none")
    line: dict[str, Any] = {"task": sample.task}
    line |= {"index": sample.index} if sample.id is None else {"id": sample.id}
    line |= {"digest": sample.digest, "flag": flag, "note": note, "time": utc_text(), "version": VERSION}
    return line | ({"answer": sample.answer} if flag == "answer-acceptable" else {})


def append(path: Path, lines: Iterable[Line]) -> None:
    """Append lines to a list, which is created where it is missing."""
    file = LineFile(path)
    try:
        for line in lines:
            file.write(line)
    finally:
        file.close()


def new_lines(current: Sequence[Line], imported: Sequence[Line]) -> list[Line]:
    """Return the imported lines that belong at the end of a list, in the order of their times.

    Lines that it has already, and those older than its last line of the same item, are left out.
    """
    last: dict[_Item, str] = {}
    for line in current:
        last[_item(line)] = max(last.get(_item(line), ""), line["time"])
    newer = [line for line in imported if line not in current and line["time"] >= last.get(_item(line), "")]
    return sorted(newer, key=lambda line: str(line["time"]))


def apply_flags(lines: Sequence[Line], samples: Iterable[Sample]) -> Applied:
    """Return the flags that hold for ``samples`` after all lines."""
    state: dict[_Item, tuple[str | None, Flag | None]] = {}
    for line in lines:
        item, answers = _item(line), (line["answer"],) if line["flag"] == "answer-acceptable" else ()
        digest, before = state.pop(item, (None, None))
        if line["flag"] is None:
            continue
        if before and answers and digest == line["digest"]:
            answers = (*(answer for answer in before.answers if answer not in answers), *answers)
        state[item] = line["digest"], Flag(line["flag"], str(line.get("note") or ""), answers)
    flags, changed = {}, []
    for sample in samples:
        by_id = None if sample.id is None else state.get((sample.task, "id", sample.id))
        digest, flag = by_id or state.get((sample.task, "index", sample.index), (None, None))
        if flag is None:
            continue
        if digest == sample.digest:
            flags[sample.name] = flag
        else:
            changed.append(sample.name)
    return Applied(flags, tuple(changed))


def _item(line: Line) -> _Item:
    return (
        (line["task"], "id", line["id"]) if isinstance(line.get("id"), str) else (line["task"], "index", line["index"])
    )
