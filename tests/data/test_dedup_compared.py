"""What a deduplication compares: licence comments, boilerplate, repetitive texts, unseen characters, other scripts.

One corpus holds all classes, each with different documents that must stay and copies that must go.
"""

import random
from itertools import combinations

import made_corpus
import numpy as np
import pyarrow as pa
import pytest
from made_corpus import PlantedDocument
from test_dedup_job import config_of, drops_of

from smalti.data.dedup.boilerplate import core, in_buckets, to_compare
from smalti.data.dedup.buckets import PLANTED
from smalti.data.dedup.job import dedup
from smalti.data.dedup.licence import without_licence, without_licences
from smalti.data.dedup.shingles import ordered_shingles

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


KINDS = {"licensed": 200, "tiny": 200, "page": 200, "flat": 200, "table": 60, "rows": 60, "chinese": 40, "japanese": 40, "thai": 40}  # fmt: skip


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
        made[f"frame-{number}"] = (page.replace(body, prose(25, rng) + " day"), "")
        made[f"frame-{number}"] = (made[f"frame-{number}"][0], made[f"frame-{number}"][0].replace("five", "six", 1))
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
    dedup(config_of(made_corpus.write_parquet(documents, folder / "c"), folder / "out", alarm_frac=1))
    return drops_of(folder / "out")


@pytest.mark.parametrize("kind", [*KINDS, "repeated"])
def test_different_documents_stay(gone, kind):
    assert sorted(name for name in gone if name.startswith(kind)) == []


@pytest.mark.parametrize("kind", sorted({name.rpartition("-")[0] for name in copies()}))
def test_copies_among_them_go(gone, kind):
    missed = [name for name in copies() if name.rpartition("-")[0] == kind and f"copy-{name}-b" not in gone]
    assert missed == []
    assert not [name for name in gone if name.startswith(f"copy-{kind}-") and name.endswith("-a")]
