"""The text of e-mail: subject and what its author wrote; replied-to text, signatures and list footers are removed."""

import re
from collections.abc import Iterator
from email import policy
from email.header import decode_header, make_header
from email.message import Message
from email.parser import BytesParser
from typing import IO

from smalti.data.build.extract.encoding import decode
from smalti.data.build.extract.html import html_text
from smalti.data.build.extract.unreadable import Unreadable

_QUOTED = re.compile(r"[ ]?>|[\w.]{1,4}>(?:[\s>]|$)")
_ESCAPED = re.compile(rb">+From ")
_VERBS = "wrote|schrieb|a écrit|escribió|ha scritto|schreef"
_WROTE = re.compile(rf"(?:On|Am|Le|El|Il|Op|Em|Den) .{{4,200}}(?:{_VERBS}).{{0,80}}:")
_SIGNATURE = re.compile(r"-- ?|_{40,}|\.{40,}")
"""The line before a signature (RFC 3676), and before the footer of a list."""
_FORWARDED = re.compile(r"-{2,} ?(?:Original Message|Ursprüngliche Nachricht|Forwarded message) ?-{2,}", re.IGNORECASE)


def message_text(data: bytes, method: str) -> str:
    """Return subject and text of a message; ``method`` reads a message that is HTML only."""
    message = BytesParser(policy=policy.compat32).parsebytes(data)
    parts = list(_parts(message))
    plain = [part for part in parts if part.get_content_type() == "text/plain"]
    pages = [part for part in parts if part.get_content_type() == "text/html"]
    if not message.keys() or not (plain or pages):
        raise Unreadable("extract/file", "it is no e-mail, or has no text")
    texts = [_decoded(part) for part in plain] or [html_text(_decoded(part), method) for part in pages[:1]]
    body = "\n\n".join(text for text in (own_text(text) for text in texts) if text)
    return "\n\n".join(text for text in (_subject(message), body) if text)


def own_text(text: str) -> str:
    """Return a body without quoted lines and what introduces them, signature, footer and forwarded messages."""
    lines: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        if _SIGNATURE.fullmatch(line.rstrip("\r")) or _FORWARDED.fullmatch(line.strip()):
            break
        if _QUOTED.match(line):
            _drop_introduction(lines)
        else:
            lines.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _drop_introduction(lines: list[str]) -> None:
    """Remove "On ... wrote:" at the end, of up to three lines."""
    end = len(lines)
    while end and not lines[end - 1]:
        end -= 1
    for start in range(end - 1, max(end - 4, -1), -1):
        if _WROTE.fullmatch(" ".join(line.strip() for line in lines[start:end])):
            del lines[start:]
            return


def _parts(message: Message) -> Iterator[Message]:
    """Yield the parts that are text and no attachment; of forwarded messages none."""
    open_parts = [message]
    while open_parts:
        part = open_parts.pop()
        if part.get_content_disposition() == "attachment" or part.get_content_type() == "message/rfc822":
            continue
        children = part.get_payload()
        if isinstance(children, list):
            open_parts.extend(child for child in reversed(children) if isinstance(child, Message))
        else:
            yield part


def _decoded(part: Message) -> str:
    data = part.get_payload(decode=True)
    assert isinstance(data, bytes)
    return decode(data, declared=part.get_content_charset())[0]


def _subject(message: Message) -> str:
    subject = message.get("Subject", "")
    try:
        subject = str(make_header(decode_header(subject)))
    except (LookupError, ValueError):
        subject = str(subject)
    return re.sub(r"\s+", " ", subject).strip()


def messages(stream: IO[bytes], limit_bytes: int) -> Iterator[bytes | None]:
    """Yield the messages of an mbox; None for one of more than ``limit_bytes``, which is not held in memory."""
    lines: list[bytes] = []
    size = 0
    at_start = True  # of a line, after an empty one or at the start of the file
    is_first = True
    line_start = True
    while line := stream.readline(1 << 16):
        if line_start and at_start and line.startswith(b"From "):
            if not is_first:
                yield None if size > limit_bytes else b"".join(lines)
            lines, size, is_first = [], 0, False
        elif is_first and not line.strip():
            continue
        else:
            is_first = False
            if line_start and _ESCAPED.match(line):  # as an mbox writes a line that begins with From
                line = line[1:]
            size += len(line)
            if size <= limit_bytes:
                lines.append(line)
        at_start = line_start and line in (b"\n", b"\r\n")
        line_start = line.endswith(b"\n")
    if not is_first:
        yield None if size > limit_bytes else b"".join(lines)
