"""What a deduplication compares: licence comments, boilerplate, repetitive texts, unseen characters, other scripts.

One corpus holds all classes, each with different documents that must stay and copies that must go.
"""

import random

import numpy as np
import pyarrow as pa
import pytest
import synthetic_corpus
from synthetic_corpus import PlantedDocument
from test_dedup_job import config_of, drops_of

from smalti.data.prepare.dedup.boilerplate import core, in_buckets, seem_repetitive, to_compare
from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.job import dedup
from smalti.data.prepare.dedup.licence import without_licence, without_licences
from smalti.data.prepare.dedup.shingles import ordered_shingles

APACHE = """Copyright 2019 The Authors

Licensed under the Apache License, Version 2.0 (the "License");
you may not use this file except in compliance with the License.
You may obtain a copy of the License at

    http://www.apache.org/licenses/LICENSE-2.0

Unless required by applicable law or agreed to in writing, software
distributed under the License is distributed on an "AS IS" BASIS,
WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
See the License for the specific language governing permissions and
limitations under the License."""
GPL = """This file is part of Example.

Example is free software: you can redistribute it and/or modify it under the terms of the GNU General Public License
as published by the Free Software Foundation, either version 3 of the License, or (at your option) any later version.

Example is distributed in the hope that it will be useful, but WITHOUT ANY WARRANTY; without even the implied warranty
of MERCHANTABILITY or FITNESS FOR A PARTICULAR PURPOSE. See the GNU General Public License for more details.

You should have received a copy of the GNU General Public License along with Example. If not, see www.gnu.org."""

COMMENTS = {
    "hash": lambda text: "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines()) + "\n",
    "slashes": lambda text: "".join(f"// {line}\n" for line in text.splitlines()),
    "block": lambda text: "/*\n" + "".join(f" * {line}\n" for line in text.splitlines()) + " */\n\n",
    "html": lambda text: f"<!DOCTYPE html>\n<!--\n{text}\n-->\n",
    "docstring": lambda text: f'#!/usr/bin/env python3\n"""\n{text}\n"""\n',
    "dashes": lambda text: "".join(f"-- {line}\n" for line in text.splitlines()) + "\n",
    "semicolons": lambda text: "\ufeff" + "".join(f";; {line}\n" for line in text.splitlines()) + "\n",
    "percent": lambda text: "".join(f"% {line}\n" for line in text.splitlines()) + "\n",
    "php": lambda text: "<?php\n/**\n" + "".join(f" * {line}\n" for line in text.splitlines()) + " */\n",
    "ml": lambda text: f"(* {text} *)\n",
}

NAV = "Home Products Services Support About us Contact Careers Log in Register Search this site Menu Close " * 2
FOOTER = (
    "Subscribe to our newsletter for news and offers. Follow us on all networks. Privacy policy, terms of use, cookie "
    "settings, imprint, site map. All prices include tax and exclude shipping. We ship to every country of the union "
    "within five working days. Our shops are open from nine to six on every day but Sunday."
)


def prose(n: int, rng: random.Random) -> str:
    return " ".join(f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.randrange(400):x}" for _ in range(n))


def code(rng: random.Random, n: int = 5) -> str:
    names = [f"{rng.choice(['get', 'set', 'make', 'run'])}_{rng.randrange(5000):x}" for _ in range(n)]
    return "".join(f"def {name}(a, b):\n    return a.{rng.choice(names)}(b + {rng.randrange(99)})\n" for name in names)


def spelled(alphabet: str, rng: random.Random, n: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(n))


CHINESE = "".join(chr(0x4E00 + i) for i in range(1500))
KANA = "".join(map(chr, range(0x3042, 0x3094))) + CHINESE[:500]
THAI_SYLLABLES = [lead + first + mark + end for lead in ("", "เ", "แ") for first in "กขคงจชดตทนปพมรลวสหอ"
                  for mark in ("", "ิ", "ี", "ั", "้", "่") for end in ("", "น", "า", "ง")]  # fmt: skip


def thai(rng: random.Random, n: int) -> str:
    return "".join(rng.choice(THAI_SYLLABLES) for _ in range(n))


def one_changed(text: str, rng: random.Random, by: str = " ") -> str:
    """``text`` with one of its pieces replaced."""
    pieces = text.split(by) if by else list(text)
    pieces[rng.randrange(len(pieces))] = "new" if by else "龍"
    return by.join(pieces)


def different(kind: str, number: int) -> str:
    """One of many different documents of a kind."""
    rng = random.Random(f"{kind} {number}")
    if kind == "licensed":
        return COMMENTS["hash"](APACHE) + code(rng)
    if kind == "tiny":
        return COMMENTS["block"](APACHE) + f"int answer_{number}(void) {{ return {rng.randrange(10**6)}; }}\n"
    if kind == "page":
        return f"{NAV}\n{prose(25, rng)}\n{FOOTER}"
    if kind == "flat":  # in one line, with a date in the frame
        return f"{NAV} {rng.randrange(1, 29)} May {rng.randrange(2000, 2026)} {prose(16, rng)} {FOOTER}"
    if kind == "table":
        return "\n".join(" ".join(rng.choice("01") for _ in range(30)) for _ in range(30))
    if kind == "rows":
        return "\n".join(f"row {i} has the value {rng.randrange(10)} and that is ok" for i in range(100))
    if kind == "chinese":
        return spelled(CHINESE, rng, 400)
    if kind == "japanese":
        return spelled(KANA, rng, 400)
    assert kind == "thai"
    return thai(rng, 3000)


KINDS = {
    "licensed": 200, "tiny": 200, "page": 200, "flat": 200, "table": 60, "rows": 60, "chinese": 40, "japanese": 40,
    "thai": 40,
}  # fmt: skip


def copies() -> dict[str, tuple[str, str]]:
    """Name of a pair -> two documents of which one must go."""
    made = {}
    for number in range(10):
        rng = random.Random(number)
        own = code(random.Random(f"own {number}"), 12)
        for (name, one), (_, two) in zip(COMMENTS.items(), [*list(COMMENTS.items())[1:], ("hash", COMMENTS["hash"])],
                                         strict=True):  # fmt: skip
            body = code(random.Random(f"relicensed {name} {number}"), 6)
            made[f"relicensed-{name}-{number}"] = (one(APACHE) + body, two(GPL) + body)
        made[f"unlicensed-{number}"] = (own, COMMENTS["slashes"](GPL) + one_changed(own, rng))
        edited = different("licensed", 1000 + number)
        made[f"edited-{number}"] = (edited, edited.replace("return", "yield", 1))
        page = different("page", 1000 + number)
        body = page.splitlines()[1]
        made[f"page-{number}"] = (page, page.replace(body, one_changed(body, rng)))
        framed = page.replace(body, prose(25, rng) + " day")
        made[f"frame-{number}"] = (framed, framed.replace("five", "six", 1))
        table = different("table", 1000 + number)
        made[f"table-{number}"] = (table, table.replace(" ", ",\t"))
        text = prose(80, rng)
        hidden = " ".join(
            word[:2] + rng.choice("\u200b\u00ad\u200d\ufeff\u2060\ufe0f") + word[2:] for word in text.split()
        )
        made[f"unseen-{number}"] = (text, hidden)
        for kind in ("chinese", "japanese"):
            text = different(kind, 1000 + number)
            made[f"{kind}-{number}"] = (text, one_changed(one_changed(text, rng, ""), rng, ""))
        text = different("thai", 1000 + number)
        made[f"thai-{number}"] = (text, text[:500] + "\u200bกขคงจชด" + text[510:])
    return made


@pytest.fixture(scope="module")
def gone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    documents = [
        PlantedDocument(f"{kind}-{i:04d}", different(kind, i), kind) for kind, n in KINDS.items() for i in range(n)
    ]
    for name, pair in copies().items():
        documents += [
            PlantedDocument(f"copy-{name}-{side}", text, "copy") for side, text in zip("ab", pair, strict=True)
        ]
    rng = random.Random("sentence")
    sentence = prose(20, rng) + ". "
    documents += [PlantedDocument(f"repeated-{n}", sentence * n, "repeated") for n in (1, 10, 1000)]
    random.Random(0).shuffle(documents)
    dedup(config_of(synthetic_corpus.write_parquet(documents, folder / "c"), folder / "out", alarm_frac=1))
    return drops_of(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "repeated"])
def test_different_documents_stay(gone, kind):
    assert sorted(name for name in gone if name.startswith(kind)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({name.rpartition("-")[0] for name in copies()}))
def test_copies_among_them_go(gone, kind):
    missed = [name for name in copies() if name.rpartition("-")[0] == kind and f"copy-{name}-b" not in gone]
    assert missed == []
    assert not [name for name in gone if name.startswith(f"copy-{kind}-") and name.endswith("-a")]


HEADS = {
    "#!/bin/sh\n# Copyright 2020 A\n#\n# This file is part of B.\n#\n# License: MIT\n\n# Prints a line.\necho\n":
        "\n\n# Prints a line.\necho\n",
    "/* Copyright A */\n#include <license.h>\n": "\n\n#include <license.h>\n",
    '"""Reads pages.\n\n:copyright: A\n"""\nimport a\n': '"""Reads pages.\n\n\n"""\nimport a\n',
    "#pragma once\n\n/* Copyright A */\n\nint a;\n": "#pragma once\n\nint a;\n",
    "#ifndef A_H\n#define A_H\n\n// SPDX: MIT\n\n#define LICENSE\n": "#ifndef A_H\n#define A_H\n\n#define LICENSE\n",
    "package a.b;\n\n/* Copyright A\n * License: MIT\n */\n\nclass A {}\n": "package a.b;\n\nclass A {}\n",
    '@charset "utf-8";\n\n/* Copyright A */\n\na { b: c }\n': '@charset "utf-8";\n\na { b: c }\n',
}  # fmt: skip


@pytest.mark.parametrize("text", HEADS)
def test_licences_go_and_other_comments_at_the_head_stay(text):
    left = without_licence(text)
    assert [line for line in left.splitlines() if line.strip("#/* ")] == [
        line for line in HEADS[text].splitlines() if line.strip("#/* ")
    ]
    assert without_licences(pa.array([text, None], pa.large_string())).to_pylist() == [left, None]


@pytest.mark.parametrize(
    "text",
    [
        "Copyright law is old.\n\nIt began in 1709.",  # prose
        "# SPDX-License-Identifier: MIT\n# Copyright A\n",  # nothing else
        "int a;\n/* Copyright A */\n",  # not at the head
        "package a reached us. Copyright law is old.\n",
        "#define LICENSE 1\n#define COPYRIGHT 2\n",
        "/* Copyright A, and no end\nint a;\n",
        "# Title\n\nA page without such words.\n",
        "",
    ],
)
def test_texts_without_a_licence_at_the_head_are_left_alone(text):
    assert without_licence(text) == text
    assert without_licences(pa.array([text], pa.large_string())).to_pylist() == [text]


@pytest.mark.parametrize(
    "text", ["#" + "=" * 300_000, "/*" * 200_000, "# a\n" * 100_000, '""" ' * 100_001, "\n" * 300_000]
)
def test_a_hostile_head_takes_time_in_proportion(text):
    assert without_licence(text) == text  # a square of its length would be minutes


def spans(pattern: str, frac: float = 0.35):
    return core(np.array([sign == "r" for sign in pattern]), 3, frac)


def test_the_core_is_between_shared_shingles():
    frame = "c" * 40
    assert spans(frame + "r" * 20 + frame) == (42, 60)  # two words of the frame are in the shingles at either end
    assert spans("r" * 20 + frame) == (0, 20)
    assert spans(frame + "r" * 20) == (42, 62)
    assert spans(frame + "r" * 8 + "c" + "r" * 8 + frame) == (42, 57)
    assert spans("ccccrrr" * 20) is None  # single words that were changed
    assert spans("c" * 100 + "r" * 8 + "c" * 100) is None  # a text with another name in it
    assert spans(frame + "r" * 60 + frame) is None  # what is shared makes no two of them near
    assert spans("rrrccrrrcc" * 8 + "r" * 20) is None
    assert spans("c") is spans("r") is None


def test_who_shares_a_bucket_and_who_is_in_a_crowd():
    hashes = np.array([1, 1, 1, 2, 2, 3, 4, 4, 4], np.int64)
    keys = np.array([10, 11, 12, 10, 13, 14, 15, 16, PLANTED], np.int64)
    found, crowd = in_buckets(hashes, keys, 3)
    assert found.tolist() == [10, 11, 12, 13, 15, 16, PLANTED]
    assert found[crowd].tolist() == [10, 11, 12]  # what was planted makes no crowd


def test_repetitive_texts_are_compared_with_none_and_contents_instead_of_pages():
    frame, body = [f"f{i}" for i in range(80)], [f"b{i}" for i in range(20)]
    page = " ".join([*frame[:40], *body, *frame[40:]])
    texts = pa.array([page, " ".join(frame), "no " * 40 + "no", "a b", ""], pa.large_string())
    common = np.sort(ordered_shingles(texts.slice(1, 1), 3)[0].astype(np.int64))
    seem = np.array([False, False, True, True, False])
    assert to_compare(texts, seem, common, 3, 0.35) == [" ".join(body), None, "", None, None]
    assert to_compare(texts, seem, common[:0], 3, 0.35) == [None, None, "", None, None]
    signatures = np.full((2, 140), 2**32 // 100, np.uint64)  # of 99 distinct shingles
    many = pa.array(["a " * 400 + "a", "a " * 90 + "a"], pa.large_string())
    assert seem_repetitive(signatures, many, 3).tolist() == [True, False]


@pytest.mark.slow
def test_boilerplate_documents_sets_how_many_share_it(tmp_path):
    """Two whole runs beside the large one."""
    pages = [PlantedDocument(f"page-{i:02d}", different("page", i), "page") for i in range(30)]
    folder = synthetic_corpus.write_parquet(pages, tmp_path / "c", files=1)
    for number, left_out in enumerate((10, 40, None)):
        dedup(config_of(folder, tmp_path / f"{number}", alarm_frac=1, boilerplate_documents=left_out, threshold=0.5))
        assert (len(drops_of(tmp_path / f"{number}")) == 0) == (left_out == 10)
