"""The text of a PDF, by PDFium: pages in order, separated by blank lines."""

import re

from smalti.data.build.extract.unreadable import Unreadable, too_large

_HYPHEN = re.compile(r"(?<=\w)\ufffe\n?(?=\w)|(?<=[a-z])-\n(?=[a-z])")
"""PDFium's mark of a hyphen at a line end, and a plain one."""
_ODD = re.compile("[\x00-\x08\x0b\x0e-\x1f\ufffe\uffff]")


def pdf_text(data: bytes, limit_bytes: int) -> str:
    """Return the text. Raises Unreadable: encrypted, damaged, without text (a scan), or more text than allowed."""
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
    except pypdfium2.PdfiumError as error:
        what = "it is encrypted" if "assword" in str(error) else f"it is not a complete PDF: {error}"
        raise Unreadable("extract/file", what) from error
    pages, n_bytes, n_broken = [], 0, 0
    with document:
        for number in range(len(document)):
            try:
                text = _page(document, number)
            except pypdfium2.PdfiumError:
                n_broken += 1
                continue
            n_bytes += len(text.encode("utf-8", "replace"))
            if n_bytes > limit_bytes:
                raise too_large(limit_bytes)
            pages.append(text)
    if not any(pages):
        why = f"{n_broken} of its pages are damaged" if n_broken else "it holds no text: scanned pages are not read"
        raise Unreadable("extract/file", why)
    return "\n\n".join(page for page in pages if page)


def _page(document: "pypdfium2.PdfDocument", number: int) -> str:  # type: ignore[name-defined]  # noqa: F821
    page = document[number]
    try:
        view = page.get_textpage()
        try:
            text = str(view.get_text_bounded())
        finally:
            view.close()
    finally:
        page.close()
    text = _ODD.sub("", _HYPHEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n")))
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()
