"""The formats that only ``smalti data build`` reads: the text of each, what is left out, and what is dropped."""

import gzip
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import made_formats as made
import pytest

from smalti.base.errors import UserError
from smalti.config.build import BuildInput
from smalti.data.build.extract.formats.mail import own_text
from smalti.data.build.extract.formats.man import man_text
from smalti.data.build.extract.html import html_method, html_text
from smalti.data.build.extract.read import extract
from smalti.data.build.extract.record import Extracted, ExtractOptions
from smalti.data.build.inputs import find_inputs
from smalti.data.documents.files import find_files

GZIPPED = "Content-Type: text/html\r\nContent-Encoding: gzip"
OPTIONS = ExtractOptions("text", None, "auto", "tags", 1_000_000, 1_000_000, 200, 30.0)


def extracted(tmp_path: Path, name: str, data: bytes, options: ExtractOptions = OPTIONS) -> list[Extracted]:
    (tmp_path / name).write_bytes(data)
    return list(extract(find_files(str(tmp_path / name), for_build=True).files[0], options))


def text_of(tmp_path: Path, name: str, data: bytes) -> str:
    (row,) = extracted(tmp_path, name, data)
    assert row.record.problem is None
    assert row.record.id == name
    return row.record.text


def problem_of(tmp_path: Path, name: str, data: bytes) -> tuple[str, str]:
    (row,) = extracted(tmp_path, name, data)
    assert row.record.problem is not None
    return row.kind, row.record.problem


def test_an_archive_gives_its_pages_by_url_and_says_what_it_leaves_out(tmp_path):
    page = "<html><body><p>Grüße {}</p></body></html>"
    chunked = page.format(4).encode()
    records = [
        made.record("warcinfo", "", b"software: x"),
        made.record("request", "http://e.org/1", b"GET / HTTP/1.1\r\n\r\n"),
        made.response("http://e.org/1", page.format(1).encode()),
        made.response("http://e.org/1", page.format(2).encode("latin-1"), "Content-Type: text/html; charset=latin-1"),
        made.response(
            "http://e.org/3", gzip.compress(page.format(3).encode()), GZIPPED
        ),
        made.response(
            "http://e.org/4", b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunked), chunked),
            "Content-Type: application/xhtml+xml\r\nTransfer-Encoding: chunked",
        ),
        made.response("http://e.org/5", b"\x89PNG", "Content-Type: image/png"),
        made.response("http://e.org/6", page.encode(), status="404 Not Found"),
        made.response("http://e.org/7", b"x" * 1_000_001),
        made.response("http://e.org/8", gzip.compress(b"x" * 2_000_000), GZIPPED),
    ]  # fmt: skip
    for name, data in (("a.warc.gz", made.warc(*records)), ("a.warc", b"".join(records))):
        rows = {row.record.id: row for row in extracted(tmp_path, name, data, replace(OPTIONS, max_expansion=10_000))}
        texts = {key: row.record.text for key, row in rows.items() if row.record.problem is None}
        assert texts == {
            "http://e.org/1": "Grüße 1", "http://e.org/1 2": "Grüße 2", "http://e.org/3": "Grüße 3",
            "http://e.org/4": "Grüße 4",
        }  # fmt: skip
        assert {row.kind for row in rows.values() if row.record.problem is None} == {"html"}
        assert rows["http://e.org/1 2"].encoding == "cp1252"
        drops = {key: (row.kind, row.record.problem) for key, row in rows.items() if row.record.problem is not None}
        assert drops["http://e.org/5"] == ("extract/response", "its type is image/png, not HTML")
        assert drops["http://e.org/6"] == ("extract/response", "its status is 404, not 200")
        assert [drops[f"http://e.org/{i}"][0] for i in (7, 8)] == ["extract/too-large"] * 2
        assert len(drops) == 4


def test_the_texts_of_common_crawl(tmp_path):
    data = made.warc(made.record("conversion", "http://e.org/", "Grüße, a < b".encode()))
    (row,) = extracted(tmp_path, "a.warc.wet.gz", data)
    assert (row.record.id, row.record.text, row.kind) == ("http://e.org/", "Grüße, a < b", "prose")


def test_a_damaged_archive_gives_what_is_before_the_damage(tmp_path):
    records = [made.response(f"http://e.org/{i}", b"<p>words</p>") for i in range(3)]
    data = made.warc(*records)
    *rows, last = extracted(tmp_path, "a.warc.gz", data[:-20])
    assert [row.record.text for row in rows] == ["words"] * len(rows)
    assert last.kind == "extract/file"
    *rows, last = extracted(tmp_path, "b.warc", b"".join([*records, b"WARC/1.0\r\nX: " + b"x" * 2_000_000]))
    assert len(rows) == 3
    assert "more than 1,048,576 bytes" in (last.record.problem or "")


def test_the_text_of_a_pdf(tmp_path):
    text = text_of(tmp_path, "a.pdf", made.pdf("First line\nsecond, hyphen-\nated", "Page two"))
    assert text == "First line\nsecond, hyphenated\n\nPage two"
    assert "scanned" in problem_of(tmp_path, "b.pdf", made.pdf(""))[1]
    assert problem_of(tmp_path, "c.pdf", b"%PDF-1.4 nothing")[0] == "extract/file"


def test_a_book_is_read_in_its_own_order(tmp_path):
    data = made.epub("One &amp; all", "Two", "Three")
    assert text_of(tmp_path, "a.epub", data) == "One & all\n\nTwo\n\nThree"
    assert problem_of(tmp_path, "b.epub", made.zipped({"mimetype": "x"}))[0] == "extract/file"


def test_the_text_of_a_word_file(tmp_path):
    assert (
        text_of(tmp_path, "a.docx", made.docx("One &lt; two", "Next", footnote="A note"))
        == "One < two\n\nNext\n\nA note"
    )
    table = "".join(f"<w:tc><w:p><w:r><w:t>{cell}</w:t></w:r></w:p></w:tc>" for cell in "ab")
    body = (
        f"<w:tbl><w:tr>{table}</w:tr></w:tbl><w:p><w:del><w:r><w:t>gone</w:t></w:r></w:del><w:r><w:tab/><w:t>x</w:t>"
        "<w:br/><w:t>y</w:t><w:instrText>PAGE</w:instrText></w:r></w:p>"
    )
    xml = f"<w:document {made.WORD}><w:body>{body}</w:body></w:document>"
    assert text_of(tmp_path, "b.docx", made.zipped({"word/document.xml": xml})).split() == ["a", "b", "x", "y"]
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaa">]>' + xml
    assert "entities" in problem_of(tmp_path, "c.docx", made.zipped({"word/document.xml": bomb}))[1]


def test_a_notebook_has_its_cells_and_no_outputs(tmp_path):
    data = made.notebook(("markdown", "# Title\n\ntext"), ("code", "x = 1\ny = 2\n"), ("code", " "), ("raw", "raw"))
    assert text_of(tmp_path, "a.ipynb", data) == "# Title\n\ntext\n\n```julia\nx = 1\ny = 2\n```\n\nraw"
    assert problem_of(tmp_path, "b.ipynb", b"[" * 100_000)[0] == "extract/file"


def test_mail_is_what_its_author_wrote(tmp_path):
    body = (
        "Hello,\n\nOn Mon, 1 Jan 2026 at 10:00, Jane\n<j@example.org> wrote:\n> quoted\n>> twice\n\nMine: x > y.\n"
        "-- \nJohn\n_______________________________________________\nlist"
    )
    assert (
        text_of(tmp_path, "a.eml", made.mail(body, "=?utf-8?q?Gr=C3=BC=C3=9Fe?=")) == "Grüße\n\nHello,\n\nMine: x > y."
    )
    parts = (
        "--B\nContent-Type: text/html\n\n<p>page</p>\n--B\nContent-Type: text/plain; charset=iso-8859-1\n"
        "Content-Transfer-Encoding: quoted-printable\n\ncaf=E9\n--B\nContent-Type: text/plain\n"
        "Content-Disposition: attachment; filename=x\n\nattached\n--B--\n"
    )
    many = made.mail(parts, headers='MIME-Version: 1.0\nContent-Type: multipart/alternative; boundary="B"')
    assert text_of(tmp_path, "b.eml", many) == "A subject\n\ncafé"
    assert text_of(tmp_path, "c.eml", made.mail("<p>A</p><p>page</p>", headers="Content-Type: text/html")).endswith(
        "A\n\npage"
    )
    box = b"".join(b"From x Mon Jan 1 2026\n" + made.mail(f"text {i}\n>From me\nFrom you\n\n") for i in range(3))
    rows = extracted(tmp_path, "d.mbox", box + b"From x\n" + b"y" * 1_000_001)
    assert [row.record.id for row in rows] == [f"d.mbox:{i}" for i in (1, 2, 3, 4)]
    assert [row.record.text for row in rows[:3]] == [f"A subject\n\ntext {i}\nFrom me\nFrom you" for i in range(3)]
    assert rows[3].kind == "extract/too-large"


def test_code_in_a_mail_is_not_quoted():
    code = "p->next = q;\nx->y\nA->B\na>b"
    assert own_text(f"See:\n{code}\n> quoted\nJD> quoted\n>quoted\n >quoted") == f"See:\n{code}"


def test_the_other_branch_of_a_condition():
    page = b".TH X 1\n.SH NAME\nx\n.ie t typeset\n.el terminal\n.ie n shown\n.el hidden\n.if t typeset\nend\n"
    assert man_text(page).split() == ["NAME", "x", "terminal", "shown", "end"]


def test_a_man_page_is_text_with_headings(tmp_path):
    page = (
        '.\\" a comment\n.TH X 1\n.de Vb\nhidden\n..\n.SH NAME\nx \\- does\n.SH "THE OPTIONS"\n.TP\n.BI \\-a " file"\n'
        "Reads\n.IR file (5),\nthen \\(lqstops\\(rq.\n.PP\n.nf\nint a;\nint \\fBb\\fR;\n.fi\n.ie n yes\n.el no\n"
    )
    assert text_of(tmp_path, "x.1.gz", gzip.compress(page.encode())) == (
        "NAME\n\nx - does\n\nTHE OPTIONS\n\n-a file Reads file(5), then “stops”.\n\nint a;\nint b;\n\nyes"
    )
    assert "no .TH" in problem_of(tmp_path, "notes.1", b"plain text")[1]
    assert "mdoc" in problem_of(tmp_path, "y.8", b".Dd today\n.Sh NAME\n")[1]


def test_resiliparse_is_a_choice(tmp_path):
    pytest.importorskip("resiliparse")
    method = html_method("resiliparse")
    assert method.startswith("resiliparse 2")
    page = (
        "<html><body><nav><a href=x>Home</a></nav><main><p>The <b>main</b> text.</p><p>More.</p></main></body></html>"
    )
    assert html_text(page, method).split("\n\n") == ["The main text.", "More."]


def test_other_commands_refuse_these_files_and_name_the_one_that_reads_them(tmp_path, monkeypatch):
    for name in ("a.pdf", "a.warc.gz", "a.ipynb", "ls.1.gz"):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UserError, match="no known kind") as caught:
            find_files(str(tmp_path / name))
        assert "smalti data build" in (caught.value.hint or "")
    (tmp_path / "a.md").write_text("x")
    (tmp_path / "libc.so.6").write_text("x")
    (tmp_path / "notes-1.2").write_text("x")
    assert [file.name for file in find_files(str(tmp_path)).files] == ["a.md"]
    found = find_files(str(tmp_path), for_build=True)
    assert [file.kind for file in found.files] == ["notebook", "text", "pdf", "warc", "man"]
    assert found.skipped == {".2": 1, ".6": 1}
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    with pytest.raises(UserError, match=r"a\.pdf needs the package 'pypdfium2'") as caught:
        find_inputs((BuildInput(path=str(tmp_path)),))
    assert "smalti[formats]" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["a.docx", "a.epub", "a.pdf", "a.warc.gz", "a.mbox.gz", "a.ipynb.gz"])
def test_decompression_bombs_are_dropped(tmp_path, name):
    many = b"a" * 30_000_000
    word = f"<w:document {made.WORD}><w:p><w:t>".encode() + many
    stream = b"BT /F1 2 Tf " + b"".join(
        b"1 0 0 1 %d %d Tm (a b c d e) Tj " % (x, y) for x in range(10, 500, 50) for y in range(10, 780, 3)
    )
    bombs = {
        "a.docx": lambda: made.zipped({"word/document.xml": word}),
        "a.epub": lambda: made.zipped({"META-INF/container.xml": made.CONTAINER, "OPS/book.opf": many}),
        "a.pdf": lambda: made.pdf(streams=(zlib.compress(stream),)),
        "a.warc.gz": lambda: gzip.compress(made.response("http://e.org/", many)),
        "a.mbox.gz": lambda: gzip.compress(many),
        "a.ipynb.gz": lambda: gzip.compress(many),
    }
    rows = extracted(tmp_path, name, bombs[name](), replace(OPTIONS, max_file_bytes=10_000))
    assert [row.kind for row in rows if row.kind != "extract/file"][-1:] == ["extract/too-large"]
    assert all(row.record.problem for row in rows)
