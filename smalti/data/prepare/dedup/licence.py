"""Leaves licence comments at the head of source files out of a comparison.

Promises: a text without comments at its head is returned as it is; the rest of a file is not touched; a file that holds
nothing else is returned whole. A licence comment is recognised by its words, in the comment syntaxes below.
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
"""A paragraph of a head comment with one of these is of a licence."""

_PARAGRAPHS_BETWEEN = 1
"""So many paragraphs without these words may stand between two that have them ("This file is part of GNU Emacs.")."""

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
"""What may stand before a licence comment and is none."""

_BLANK = r"[\s\ufeff]*"
_ONE = "|".join([_PRELUDE, *(rf"{re.escape(a)}(?s:.*?){re.escape(b)}" for a, b in _BLOCKS), rf"(?m:(?:{_LINE})[^\n]*)"])
_HEAD = re.compile(rf"{_BLANK}(?:{_ONE})")
_FIRST = r"\A[\s\x{FEFF}]*(?:[#/<'\"({%;!=*.@:cCdrR-]|---|package[ \t])"
"""With what a text begins that may begin with a comment; for the engine of Arrow, which passes over all others."""

_WORD = re.compile(r"\w")


def without_licences(texts: pa.Array) -> pa.Array:
    """``texts`` (large_string), each without the licence comments at its head."""
    begins = pc.fill_null(pc.match_substring_regex(texts, _FIRST), False)
    if not pc.any(begins).as_py():
        return texts
    changed = [without_licence(text) for text in texts.filter(begins).to_pylist()]
    return pc.replace_with_mask(texts, begins, pa.array(changed, texts.type))


def without_licence(text: str) -> str:
    """``text`` without the licence comments at its head; ``text`` where nothing else would be left."""
    end = 0
    while found := _HEAD.match(text, end):
        end = found.end()
    first = last = -1
    between = 0
    for start, stop in _paragraphs(text, end):
        if _LICENCE.search(text, start, stop):
            first, last, between = (start if first < 0 else first), stop, 0
        elif first >= 0:
            between += 1
            if between > _PARAGRAPHS_BETWEEN:
                break
    rest = f"{text[:first]}\n{text[last:]}" if first >= 0 else text
    return rest if _WORD.search(rest) else text


def _paragraphs(text: str, end: int) -> Iterator[tuple[int, int]]:
    """Where the paragraphs before ``end`` begin and stop: lines in a row with something to read in them."""
    start = at = 0
    while at < end:
        stop = text.find("\n", at, end) + 1 or end
        if not _WORD.search(text, at, stop):
            if start < at:
                yield start, at
            start = stop
        at = stop
    if start < end:
        yield start, end
