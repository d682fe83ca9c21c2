"""Files that cannot be read, decompression bombs, and names that are hard to handle."""

import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

SOURCE = "hostile"
FILE, RECORD, ENCODING, TOO_LARGE = "extract/file", "extract/record", "extract/encoding", "extract/too-large"
_BOMB_BYTES = 80 << 20
NAMES = (
    "two\nlines.txt", "-rf.txt", "--help.txt", "a..b...txt", "100%s%n%d.txt",
    "smile \U0001f600\U0001f468\u200d\U0001f469.txt",
    "right \u202e to left.txt", "quote ' \" `.txt", "back\\slash.txt", "$(touch x);&|<>.txt", "tab\tand\rreturn.txt",
    " blanks around .txt", "\u65e5\u672c\u8a9e.txt", "e\u0301 combined.txt", "\u00e9 composed.txt", "#1.txt",
    "a#2.txt", "x:7.txt",
    "NUL.txt", "~.txt", "*.txt", "[a-z]?.txt", "bell \x07 escape \x1b[31m.txt", "l" * 251 + ".txt",
)  # fmt: skip
UNNAMABLE = (b"\xff\xfe.txt", b"caf\xe9.txt", b"\xc3\x28 half.txt", b"\xed\xa0\x80 surrogate.txt")


def write(folder: Path, rng: random.Random, texts: list[str]) -> list[dict[str, Any]]:
    """Write all of them below ``folder``, and return the key; ``texts`` are contents of files that can be read.

    Raises ValueError if there are too few texts.
    """
    if len(texts) < len(NAMES) + 10:
        raise ValueError(f"{len(texts)} texts; {len(NAMES) + 10} are needed")
    folder.mkdir(parents=True)
    key: list[dict[str, Any]] = []
    long = "\n\n".join(texts[:10])
    for name, data, rule in [*_broken(rng, long.encode()), *_bombs()]:
        (folder / name).write_bytes(data)
        plant = "bomb" if rule == TOO_LARGE else "broken"
        key.append({"id": f"{SOURCE}/{name}", "plant": plant, "rule": rule})
    for number, (line, rule) in enumerate(_lines()):
        name = f"broken/lines-{number}.jsonl"
        (folder / "broken").mkdir(exist_ok=True)
        (folder / name).write_bytes(line)
        key.append({"id": f"{SOURCE}/{name}:1", "plant": "broken", "rule": rule})
    key += _parquet(folder)
    key += _named(folder, texts[10:])
    return key + _unreadable(folder)


def _broken(rng: random.Random, text: bytes) -> Iterator[tuple[str, bytes, str]]:
    import zstandard

    noise = rng.randbytes(6000)
    lines = [line for line in text.decode("utf-8", "replace").split("\n") if line]
    rows = "".join(json.dumps({"text": line}) + "\n" for line in lines).encode()
    packed, squeezed = gzip.compress(text), zstandard.compress(text)
    for share in (10, 50, 90, 99):
        yield f"cut-{share}.txt.gz", packed[: len(packed) * share // 100], FILE
        yield f"cut-{share}.md.zst", squeezed[: len(squeezed) * share // 100], FILE
    yield "cut.jsonl.gz", gzip.compress(rows[: len(rows) // 3])[:-9], FILE
    yield "checksum.txt.gz", packed[:-8] + b"12345678", FILE
    yield "no-gz.txt.gz", text, FILE
    yield "no-zst.txt.zst", noise, FILE
    yield "noise.txt", noise, ENCODING
    yield "noise.html", noise, ENCODING
    yield "null.txt", text[:500] + b"\0" * 600 + b"\xff\xfe\xfd", ENCODING
    yield "program.txt", b"\x7fELF\x02\x01\x01" + noise, ENCODING
    yield "image.txt", b"\x89PNG\r\n\x1a\n" + noise, ENCODING
    yield "no-parquet.parquet", text, FILE
    yield "cut.parquet", b"PAR1" + noise, FILE
    yield "half.txt", "ab".encode("utf-16") + b"\x00", ENCODING


def _bombs() -> Iterator[tuple[str, bytes, str]]:
    import zstandard

    zeros = b"a" * _BOMB_BYTES
    yield "bomb.txt.gz", gzip.compress(zeros), TOO_LARGE
    yield "bomb.html.gz", gzip.compress(b"<p>" + zeros), TOO_LARGE
    yield "bomb.md.zst", zstandard.compress(zeros), TOO_LARGE
    yield "bomb.jsonl.gz", gzip.compress(b'{"text": "' + zeros), TOO_LARGE
    yield "bomb.jsonl.zst", zstandard.compress(b'{"text": "' + zeros), TOO_LARGE
    yield "large.txt", b"words and words " * ((64 << 20) // 16 + 1), TOO_LARGE


def _lines() -> Iterator[tuple[bytes, str]]:
    good = json.dumps({"text": "A line that follows a broken one."}).encode()
    lines = (b'{"text": "x', b"{'text': 1}", b'{"other": "no text"}', b"[]", b'{"text": 5}', b'{"text": null}',
                 b"\xff\xfe", b"[" * 100_000, b'{"text": "\xff"}', b"null",
             b'{"text": {"a": 1}}', b"nonsense")  # fmt: skip
    for line in lines:
        yield line + b"\n" + good + b"\n", RECORD


def _parquet(folder: Path) -> list[dict[str, Any]]:
    pq.write_table(pa.table({"other": ["no text"]}), folder / "no-text.parquet")
    pq.write_table(pa.table({"text": [1, 2, 3]}), folder / "numbers.parquet")
    pq.write_table(pa.table({"text": [f"a text {n} " * 90 for n in range(2000)]}), folder / "cut-off.parquet")
    data = (folder / "cut-off.parquet").read_bytes()
    (folder / "cut-off.parquet").write_bytes(data[: len(data) * 2 // 3])
    names = ("no-text.parquet", "cut-off.parquet", *(f"numbers.parquet:{row}" for row in (1, 2, 3)))
    return [{"id": f"{SOURCE}/{name}", "plant": "broken", "rule": "extract/"} for name in names]


def _named(folder: Path, texts: list[str]) -> list[dict[str, Any]]:
    key: list[dict[str, Any]] = []
    for name, text in zip(NAMES, texts, strict=False):
        (folder / name).write_text(text)
        key.append({"id": f"{SOURCE}/{name}", "plant": "name", "rule": None})
    for raw in UNNAMABLE:
        Path(os.fsdecode(os.fsencode(folder) + b"/" + raw)).write_text("A file with a name that is not UTF-8.")
        shown = raw.decode("utf-8", "backslashreplace")
        key.append({"id": f"{SOURCE}/{shown}", "plant": "unnamable", "rule": "extract/name", "ends": shown})
    deep = folder.joinpath(*["deep"] * 30)
    deep.mkdir(parents=True)
    (deep / "file.txt").write_text(texts[len(NAMES) % len(texts)])
    key.append({"id": f"{SOURCE}/{'deep/' * 30}file.txt", "plant": "name", "rule": None})
    return key


def _unreadable(folder: Path) -> list[dict[str, Any]]:
    """A file that gives an error when it is read (also for root); links in circles and to nothing, and a pipe."""
    (folder / "memory.txt").symlink_to("/proc/self/mem")
    (folder / "circle").symlink_to(folder)
    (folder / "to-itself.txt").symlink_to("to-itself.txt")
    (folder / "to-nothing.txt").symlink_to("nothing")
    os.mkfifo(folder / "pipe.txt")
    return [{"id": f"{SOURCE}/memory.txt", "plant": "broken", "rule": FILE}]
