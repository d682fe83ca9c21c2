"""Small files of the formats that ``smalti data build`` reads, written without the packages that read them."""

import gzip
import io
import json
import zipfile

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OPS/book.opf"/></rootfiles></container>'
)


def zipped(members: dict[str, str | bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return held.getvalue()


def docx(*paragraphs: str, footnote: str = "") -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    members: dict[str, str | bytes] = {"word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>"}
    if footnote:
        note = f"<w:footnote><w:p><w:r><w:t>{footnote}</w:t></w:r></w:p></w:footnote>"
        members["word/footnotes.xml"] = f"<w:footnotes {WORD}>{note}</w:footnotes>"
    return zipped(members)


def epub(*chapters: str) -> bytes:
    """Chapters in reading order; their names are in the opposite order."""
    names = [f"{len(chapters) - i} c.xhtml" for i in range(len(chapters))]
    items = "".join(
        f'<item id="i{i}" href="{name.replace(" ", "%20")}" media-type="application/xhtml+xml"/>'
        for i, name in enumerate(names)
    )
    spine = "".join(f'<itemref idref="i{i}"/>' for i in range(len(names)))
    package = (
        f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>'
    )
    pages = {
        f"OPS/{name}": f"<html><body><p>{text}</p></body></html>" for name, text in zip(names, chapters, strict=True)
    }
    return zipped({"META-INF/container.xml": CONTAINER, "OPS/book.opf": package, **pages})


def pdf(*pages: str, streams: tuple[bytes, ...] = ()) -> bytes:
    """Pages of lines in Helvetica; ``streams``: compressed contents to use as pages instead."""
    contents = [
        b"BT /F1 12 Tf 14 TL 72 720 Td "
        + b" ".join(b"(" + line.encode("latin-1") + b") Tj T*" for line in page.split("\n"))
        + b" ET"
        for page in pages
    ]
    bodies = [b"<</Length %d>>stream\n%s\nendstream" % (len(content), content) for content in contents]
    bodies += [b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(data), data) for data in streams]
    kids = b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(bodies)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count %d/Kids[%s]>>" % (len(bodies), kids),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for i, body in enumerate(bodies):
        page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Resources<</Font<</F1 3 0 R>>>>/Contents %d 0 R>>"
        objects += [page % (5 + 2 * i), body]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    end = b"xref\n0 %d\n0000000000 65535 f \n%strailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n"
    return out + end % (len(objects) + 1, table, len(objects) + 1, len(out))


def response(url: str, body: bytes, headers: str = "Content-Type: text/html", status: str = "200 OK") -> bytes:
    """An uncompressed record of a WARC."""
    return record("response", url, f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n".encode() + body)


def record(kind: str, url: str, content: bytes) -> bytes:
    type_ = "text/plain" if kind == "conversion" else "application/http; msgtype=response"
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: {url}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:1>\r\nContent-Type: {type_}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def warc(*records: bytes) -> bytes:
    """Records, each a gzip member of its own, as crawlers write them."""
    return b"".join(map(gzip.compress, records))


def notebook(*cells: tuple[str, str]) -> bytes:
    plain = [{"cell_type": kind, "source": text.splitlines(True), "outputs": ["left out"]} for kind, text in cells]
    return json.dumps({"cells": plain, "metadata": {"language_info": {"name": "julia"}}, "nbformat": 4}).encode()


def mail(body: str, subject: str = "A subject", headers: str = "Content-Type: text/plain; charset=utf-8") -> bytes:
    return f"From: a@example.org\nTo: b@example.org\nSubject: {subject}\n{headers}\n\n{body}".encode()
