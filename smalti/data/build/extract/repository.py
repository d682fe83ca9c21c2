"""What is dropped of a code repository: vendored and generated files, and those without a permissive licence.

The licence of a file is its SPDX line, else what its first 4,096 characters say, else that of the licence files
(LICENSE, COPYING ...) in the nearest folder, its own or one above, that has any. Licences are recognised by passages.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import replace

from smalti.data.documents.files import SourceFile, is_code

LICENCE_RULE = "code/licence"
GENERATED_RULE = "code/generated"
VENDORED_RULE = "code/vendored"

_PERMISSIVE = (
    "0BSD Apache-2.0 BSD-1-Clause BSD-2-Clause BSD-2-Clause-Patent BSD-3-Clause BSD-3-Clause-Clear BSL-1.0 CC0-1.0 "
    "HPND ISC MIT MIT-0 NCSA PostgreSQL PSF-2.0 Python-2.0 Unicode-3.0 Unlicense UPL-1.0 WTFPL X11 Zlib libpng-2.0"
)
PERMISSIVE = frozenset(_PERMISSIVE.split())
"""SPDX names that ``licences: permissive`` keeps."""
_PASSAGES = (
    ("AGPL", "gnu affero general public license"),
    ("LGPL", "gnu lesser general public license"),
    ("LGPL", "gnu library general public license"),
    ("GPL", "gnu general public license"),
    ("MPL-2.0", "mozilla public license"),
    ("EPL", "eclipse public license"),
    ("CDDL", "common development and distribution license"),
    ("EUPL", "european union public licen"),
    ("SSPL", "server side public license"),
    ("BUSL", "business source license"),
    ("CC-BY-NC", "creative commons attribution noncommercial"),
    ("BSD-4-Clause", "all advertising materials mentioning features or use of this software must display"),
    ("MIT", "permission is hereby granted free of charge to any person obtaining a copy of this software"),
    ("ISC", "permission to use copy modify and or distribute this software for any purpose with or without fee"),
    ("ISC", "permission to use copy modify and distribute this software for any purpose with or without fee"),
    ("Apache-2.0", "apache license version 2 0"),
    ("Apache-2.0", "www apache org licenses license 2 0"),
    ("Unlicense", "this is free and unencumbered software released into the public domain"),
    ("Zlib", "altered source versions must be plainly marked as such"),
    ("BSL-1.0", "boost software license version 1 0"),
    ("CC0-1.0", "cc0 1 0 universal"),
    ("PSF-2.0", "python software foundation license version 2"),
)
_BSD = "redistribution and use in source and binary forms with or without modification are permitted"
_BSD_3 = "endorse or promote products derived from this software"
_SPDX = re.compile(r"SPDX-License-Identifier:[ \t]*([\w.+() \t-]{2,200})")
_LICENCE_FILE = re.compile(r"(?:un)?licen[cs]e|copying|mit-license", re.IGNORECASE)
_HEAD_CHARACTERS = 4096
_FILE_BYTES = 64 << 10

_VENDORED_FOLDERS = (
    "node_modules bower_components jspm_packages vendor vendors vendored _vendor third_party third-party thirdparty "
    "3rdparty 3rd_party site-packages dist-packages godeps pods carthage"
)
_VENDORED = frozenset(_VENDORED_FOLDERS.split())
_GENERATED_NAME = re.compile(
    r".*(?:[.-]min\.(?:js|css|mjs)|_pb2(?:_grpc)?\.pyi?|\.pb\.(?:go|cc|h)|\.g\.dart|[.-]lock\.ya?ml|\.designer\.cs)",
    re.IGNORECASE,
)
_GENERATED = re.compile(
    r"@generated\b|\bDO NOT (?:EDIT|MODIFY)\b|\bdo not edit\b[^\n]{0,80}\bgenerat"
    r"|\bgenerated\b[^\n]{0,80}\bdo not edit\b|\b(?:automatically|auto-?) ?generated (?:by|file|from|code)\b"
    r"|\bthis file (?:is|was) (?:auto-?|automatically )?generated\b"
)
_HEAD_LINES = 20
_MINIFIED = (".js", ".mjs", ".cjs", ".css")
_MINIFIED_MEAN = 300
"""Mean characters of a line of scripts and style sheets from which on they are minified."""


def with_licences(root: str, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Return the files of the folder ``root`` with the licences of their folders."""
    known: dict[str, str | None] = {}

    def of(folder: str) -> str | None:
        if folder not in known:
            licence = _of_folder(os.path.join(root, folder) if os.path.isdir(root) else os.path.dirname(root))
            known[folder] = licence or (of(os.path.dirname(folder)) if folder else None)
        return known[folder]

    return tuple(replace(file, licence=of(os.path.dirname(file.name))) for file in files)


def vendored(name: str) -> str | None:
    """Return why a file is a copy of another project, by the folders in its name."""
    folder = next((part for part in name.split("/")[:-1] if part.lower() in _VENDORED), None)
    return None if folder is None else f"it is in a folder '{folder}', for copies of other projects"


def generated(name: str, text: str) -> str | None:
    """Return why a file of source code is generated, by its name, its first 20 lines, or the length of its lines."""
    base = os.path.basename(name).removesuffix(".gz").removesuffix(".zst")
    if _GENERATED_NAME.fullmatch(base):
        return "its name is one of generated files"
    if not is_code(name):
        return None
    mark = _GENERATED.search("\n".join(text[: 4 * _HEAD_CHARACTERS].split("\n", _HEAD_LINES)[:_HEAD_LINES]))
    if mark:
        return f"its head says '{mark[0][:80]}'"
    mean = len(text) / (text.count("\n") + 1)
    if base.lower().endswith(_MINIFIED) and mean > _MINIFIED_MEAN:
        return f"it is minified: its lines have {mean:.0f} characters on average"
    return None


def licence_of(text: str, folder_licence: str | None) -> str | None:
    """Return the licence of a file: SPDX names, joined by AND and OR; None where none is recognised."""
    head = text[:_HEAD_CHARACTERS]
    match = _SPDX.search(head)
    return match[1].strip() if match else recognised(head) or folder_licence


def is_permissive(licence: str | None) -> bool:
    """Whether an SPDX expression can be met with permissive licences only."""
    expression = licence or "unknown"
    while "(" in expression:
        inner = re.sub(r"\(([^()]*)\)", lambda match: "MIT" if is_permissive(match[1]) else "no", expression)
        if inner == expression:
            return False
        expression = inner
    options = [re.split(r"\s+AND\s+", option) for option in re.split(r"\s+OR\s+", expression.strip())]
    return any(all(name.partition(" WITH ")[0].strip() in PERMISSIVE for name in option) for option in options)


def recognised(text: str) -> str | None:
    """Return the licences whose passages are in a text; where one is not permissive, the first of those alone."""
    words = " ".join(re.findall(r"[a-z0-9]+", text.lower()))
    places = {name: words.find(passage) for name, passage in reversed(_PASSAGES) if passage in words}
    if _BSD in words and "BSD-4-Clause" not in places:
        places["BSD-3-Clause" if _BSD_3 in words else "BSD-2-Clause"] = words.find(_BSD)
    others = sorted((place, name) for name, place in places.items() if name not in PERMISSIVE)
    if others:
        return others[0][1]
    return " AND ".join(sorted(places)) or None


def _of_folder(folder: str) -> str | None:
    """Return the licence of the licence files in a folder; all of them must be recognised."""
    try:
        names = sorted(name for name in os.listdir(folder) if _LICENCE_FILE.match(name))
    except OSError:
        return None
    licences = []
    for name in names:
        path = os.path.join(folder, name)
        if os.path.isfile(path) and not is_code(name):
            try:
                with open(path, "rb") as file:
                    text = file.read(_FILE_BYTES).decode("utf-8", "replace")
            except OSError:
                text = ""
            spdx = _SPDX.search(text)
            licences.append((spdx[1].strip() if spdx else recognised(text)) or "unknown")
    return " AND ".join(f"({name})" if " OR " in name else name for name in dict.fromkeys(licences)) or None
