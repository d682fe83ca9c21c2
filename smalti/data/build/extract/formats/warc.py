"""The pages of web archives: responses of WARC files, and the extracted texts of Common Crawl's WET files."""

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from smalti.data.build.extract.encoding import decode
from smalti.data.build.extract.html import html_text
from smalti.data.build.extract.unreadable import Unreadable, too_large

SKIPPED_RULE = "extract/response"
_HEADER_BYTES = 1 << 20
"""The most that the headers of a record may take."""
_READ_BYTES = 1 << 16
_MAX_URL = 2000
_PAGES = ("text/html", "application/xhtml+xml")


class Response(NamedTuple):
    """A page as it was sent, or why it is not read."""

    url: str
    body: bytes = b""
    content_encoding: str = ""
    chunked: bool = False
    charset: str | None = None
    is_page: bool = True
    problem: tuple[str, str] | None = None
    """Rule and reason."""


def responses(stream: IO[bytes], limit_bytes: int) -> Iterator[Response]:
    """Yield the responses of an archive that is already decompressed. Unreadable: the rest of it is damaged."""
    from warcio.archiveiterator import WARCIterator
    from warcio.exceptions import ArchiveLoadFailed

    bounded = _Bounded(stream)
    records = WARCIterator(bounded)
    while True:
        bounded.left_bytes = _HEADER_BYTES
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # warcio prints what is wrong
                record = next(records, None)
        except (ArchiveLoadFailed, ValueError, AttributeError, IndexError) as error:
            raise Unreadable("extract/file", f"its records are damaged: {str(error)[:200]}") from error
        if record is None:
            return
        bounded.left_bytes = None
        if record.rec_type in ("response", "conversion"):
            yield _response(record, limit_bytes)
        while record.raw_stream.read(_READ_BYTES):
            pass


def page_text(response: Response, encoding: str, method: str, limit_bytes: int) -> tuple[str, str]:
    """Return the text of a response, and the name of its encoding."""
    data = _decompressed(response, limit_bytes)
    page, name = decode(data, encoding, is_html=response.is_page, declared=response.charset)
    return (html_text(page, method) if response.is_page else page), name


class _Bounded:
    """A stream that raises Unreadable after ``left_bytes``: a line without an end must not be held in memory."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.left_bytes: int | None = None

    def read(self, n_bytes: int = -1) -> bytes:
        try:
            data: bytes = self._stream.read1(n_bytes)  # type: ignore[attr-defined]  # read would lose what is before damage
        except EOFError as error:  # which warcio takes for the end
            raise Unreadable("extract/file", f"it is not complete: {error}") from error
        if self.left_bytes is not None:
            self.left_bytes -= len(data)
            if self.left_bytes < 0:
                raise Unreadable("extract/file", f"the headers of a record have more than {_HEADER_BYTES:,} bytes")
        return data


def _response(record: Any, limit_bytes: int) -> Response:
    url = re.sub(r"\s", "%20", record.rec_headers.get_header("WARC-Target-URI") or "")[:_MAX_URL]
    url = url.encode("utf-8", "replace").decode() or "without a URL"
    is_page = record.rec_type == "response"
    headers = record.http_headers
    if is_page:
        status = headers.get_statuscode() if headers else ""
        if status != "200":
            return Response(url, problem=(SKIPPED_RULE, f"its status is {status[:20] or 'missing'}, not 200"))
        type_, _, parameters = (headers.get_header("Content-Type") or "").partition(";")
        if type_.strip().lower() not in _PAGES:
            return Response(url, problem=(SKIPPED_RULE, f"its type is {type_.strip()[:80] or 'missing'}, not HTML"))
    body = record.raw_stream.read(limit_bytes + 1)
    if len(body) > limit_bytes:
        reason = f"it is larger than {limit_bytes:,} bytes (max_file_bytes)"
        return Response(url, problem=("extract/too-large", reason))
    if not is_page:
        return Response(url, body, charset="utf-8", is_page=False)
    charset = re.search(r"charset\s*=\s*[\"']?([\w.:-]{2,40})", parameters, re.IGNORECASE)
    chunked = "chunked" in (headers.get_header("Transfer-Encoding") or "").lower()
    content_encoding = (headers.get_header("Content-Encoding") or "").strip().lower()
    return Response(url, body, content_encoding, chunked, charset[1].lower() if charset else None)


def _decompressed(response: Response, limit_bytes: int) -> bytes:
    """Remove the transfer and content encodings; archives often name one whose effect is already removed."""
    body = response.body
    if response.chunked:
        from warcio.bufferedreaders import ChunkedDataReader

        body = ChunkedDataReader(io.BytesIO(body)).read()
    if response.content_encoding in ("gzip", "x-gzip") and body[:2] == b"\x1f\x8b":
        return _inflated(body, 31, limit_bytes)
    if response.content_encoding == "deflate":
        return _inflated(body, 15 if body[:1] == b"\x78" else -15, limit_bytes)
    if response.content_encoding == "br":
        raise Unreadable("extract/response", "its content encoding is br, which is not read")
    return body


def _inflated(body: bytes, window_bits: int, limit_bytes: int) -> bytes:
    try:
        data = zlib.decompressobj(window_bits).decompress(body, limit_bytes + 1)
    except zlib.error as error:
        if window_bits < 0:
            return body
        raise Unreadable("extract/file", f"its content encoding is damaged: {error}") from error
    if len(data) > limit_bytes:
        raise too_large(limit_bytes)
    return data
