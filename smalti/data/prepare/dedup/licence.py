"""Removes licence comments at the head of source files before they are compared.

A licence comment is recognised by its words, in the comment syntaxes below. The rest of a file is not changed; a text
without comments at its head, or with nothing else than licences, is returned unchanged.
"""

import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

_LICENCE = re.compile(
    r"licen[cs]|copyright|copyleft|spdx|©|\(c\)\s*\d{4}|all rights reserved|public domain|warrant(?:y|ies)"
    r"|redistribut|permission is hereby granted|endorse or promote",
    re.IGNORECASE,
)
"""A paragraph of a head comment with one of these belongs to a licence."""

_PARAGRAPHS_BETWEEN = 1
"""Paragraphs without these words that may be between two with them ("This file is part of GNU Emacs.")."""

_BLOCKS = (
    ("/*", "*/"), ("<!--", "-->"), ('"""', '"""'), ("'''", "'''"), ("(*", "*)"), ("{-", "-}"), ("{#", "#}"),
    ("<%--", "--%>"), ("{{!--", "--}}"), ("--[[", "]]"), ("#|", "|#"), ("<#", "#>"), ("#=", "=#"), ("%{", "%}"),
    ("/+", "+/"), ("=begin", "=end"), ("=pod", "=cut"),
)  # fmt: skip
"""C, HTML, Python, ML, Haskell, Jinja, JSP, Handlebars, Lua, Lisp, PowerShell, Julia, Matlab, D, Ruby, Perl."""

_PREPROCESSOR = r"[ \t]*(?:include|import|define|undef|if|ifdef|ifndef|else|elif|endif|error|pragma|line)\b"
_LINE = (
    rf"#(?!{_PREPROCESSOR})|//|--|;|%|dnl\b|\.\\\"|'\\\"|\.\.(?=[ \t])|@c\b|::|@?(?i:rem)\b"
    r"|[\"'!](?=[ \t\n]|$)|[Cc*](?=[ \t]{2}|\n|$)"
)
"""Shell and Python, C++, SQL and Ada, Lisp, TeX, m4, man, reST, Texinfo, batch, Vim, Visual Basic, Fortran, COBOL."""

_PRELUDE = (
    r"#![^\n]*|<\?(?:xml[^>]*\?>|php|=)?|<!(?i:doctype)[^>]*>|<html[^>]*>|@echo off|['\"]use strict['\"];?|---"
    r"|#[ \t]*pragma[ \t]+once\b[^\n]*|#[ \t]*ifndef[ \t]+\w+[ \t]*\r?\n#[ \t]*define[ \t]+\w+[ \t]*(?=[\r\n])"
    r"|package[ \t]+[\w.:]+[ \t]*;?[ \t]*(?=[\r\n])|@charset[^\n]*"
)
"""What may precede a licence comment."""

_BLANK = r"[\s\ufeff]*"
_ONE = "|".join([_PRELUDE, *(rf"{re.escape(a)}(?s:.*?){re.escape(b)}" for a, b in _BLOCKS), rf"(?m:(?:{_LINE})[^\n]*)"])
_HEAD = re.compile(rf"{_BLANK}(?:{_ONE})")
_FIRST = r"\A[\s\x{FEFF}]*(?:[#/<'\"({%;!=*.@:cCdrR-]|---|package[ \t])"
"""Beginnings of texts that may begin with a comment, as an expression for Arrow, which skips all others."""

_WORD = re.compile(r"\w")


def without_licences(texts: pa.Array) -> pa.Array:
    """Remove the licence comments at the head of each of ``texts`` (large_string)."""
    may_begin = pc.fill_null(pc.match_substring_regex(texts, _FIRST), False)
    if not pc.any(may_begin).as_py():
        return texts
    changed = [without_licence(text) for text in texts.filter(may_begin).to_pylist()]
    return pc.replace_with_mask(texts, may_begin, pa.array(changed, texts.type))


def without_licence(text: str) -> str:
    """Remove the licence comments at the head of ``text``, unless nothing else would be left."""
    end = 0
    while match := _HEAD.match(text, end):
        end = match.end()
    first = last = -1
    between = 0
    for start, stop in _paragraphs(text, end):
        if _LICENCE.search(text, start, stop):
            first = start if first < 0 else first
            last = stop
            between = 0
        elif first >= 0:
            between += 1
            if between > _PARAGRAPHS_BETWEEN:
                break
    rest = f"{text[:first]}\n{text[last:]}" if first >= 0 else text
    return rest if _WORD.search(rest) else text


def _paragraphs(text: str, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the paragraphs before ``end``: consecutive lines with a word."""
    start = line = 0
    while line < end:
        stop = text.find("\n", line, end) + 1 or end
        if not _WORD.search(text, line, stop):
            if start < line:
                yield start, line
            start = stop
        line = stop
    if start < end:
        yield start, end
