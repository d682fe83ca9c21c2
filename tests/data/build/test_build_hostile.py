"""Damaged and hostile files: a parser may crash, hang or fill its child process; the file is then dropped."""

import gzip
import os
from pathlib import Path

import made_formats as made
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smalti.data.build.extract.isolated import parse
from smalti.data.build.extract.read import extract
from smalti.data.build.extract.record import ExtractOptions
from smalti.data.build.extract.unreadable import Unreadable
from smalti.data.documents.files import find_files

OPTIONS = ExtractOptions("text", None, "auto", "tags", 1_000_000, 1_000_000, 200, 30.0)
PAGE = b"<html><body><p>Some words of a page.</p></body></html>"
MAN = b'.TH X 1\n.SH NAME\nx \\- y\n.TP\n.BI \\-a " b"\n.if n \\{\\\nz\n.\\}\n.nf\nverbatim \\fBx\\fR \\[u00E9]\n.fi\n'
FILES = {
    "a.warc.gz": made.warc(*(made.response(f"http://e.org/{i}", PAGE) for i in range(3))),
    "a.warc": b"".join(made.response(f"http://e.org/{i}", PAGE) for i in range(3)),
    "a.pdf": made.pdf("A first line\nand a second", "Page two"),
    "a.epub": made.epub("One", "Two"),
    "a.docx": made.docx("One", "Two", footnote="A note"),
    "a.ipynb": made.notebook(("markdown", "# T"), ("code", "x = 1")),
    "a.eml": made.mail(
        "Hello\n> x\n-- \nme", "=?utf-8?q?Gr=C3=BC=C3=9Fe?=", 'Content-Type: text/plain; charset="utf-8"'
    ),
    "a.mbox": b"".join(b"From x\n" + made.mail(f"text {i}\n\n") for i in range(3)),
    "a.1": MAN,
    "a.1.gz": gzip.compress(MAN),
    "a.html": PAGE,
}


def test_a_parser_that_crashes_hangs_or_takes_too_much_memory_is_replaced():
    with pytest.raises(Unreadable, match=r"crashed .exit code 3"):
        parse(os._exit, 3, limit_s=10)
    with pytest.raises(Unreadable, match=r"crashed .SIGABRT"):
        parse(os.abort, limit_s=10)
    with pytest.raises(Unreadable, match=r"more than 0\.3 s") as caught:
        parse(eval, "any(iter(int, 1))", limit_s=0.3)
    assert caught.value.rule == "extract/time"
    with pytest.raises(Unreadable, match="more than 4 GiB"):
        parse(bytes, 5 << 30, limit_s=10)
    with pytest.raises(Unreadable, match="ValueError: invalid literal"):
        parse(int, "x", limit_s=10)
    assert parse(int, "7", limit_s=10) == 7


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_gives_documents_or_reasons_and_no_error(tmp_path: Path, name: str, data: st.DataObject):
    content = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(0, 8))):
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        content[bit // 8] ^= 1 << bit % 8
    end = data.draw(st.one_of(st.just(len(content)), st.integers(0, len(content))))
    (tmp_path / name).write_bytes(bytes(content[:end]))
    for row in extract(find_files(str(tmp_path / name), for_build=True).files[0], OPTIONS):
        assert row.record.id
        assert row.record.problem is None or row.kind.startswith("extract/")
        row.record.text.encode()
        row.record.id.encode()


def test_the_whole_files_are_read(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    for file in find_files(str(tmp_path), for_build=True).files:
        rows = list(extract(file, OPTIONS))
        assert rows, file.name
        assert [row.record.problem for row in rows] == [None] * len(rows)
