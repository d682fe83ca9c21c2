"""Pages of text from Debian's documentation packages, and a crawl of them with repeats.

Packages are downloaded by ``apt-get download`` and unpacked by ``dpkg-deb``, without installing.
"""

import gzip
import json
import random
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experts_study.corpus import package

PACKAGES = {
    "python3.11-doc": "PSF-2",
    "perl-doc": "Artistic or GPL-1+",
    "git-doc": "GPL-2",
    "glibc-doc": "LGPL-2.1+",
}
"""Packages and their licences."""
PAGE_CHARACTERS, MAX_PAGE_CHARACTERS = 1500, 4000
EXACT_FRAC, EXACT_MOST = 0.15, 64
"""Fraction of the pages that have exact copies, and the most copies of one; P(n copies) is proportional to n ** -2."""
NEAR_FRAC, NEAR_MOST, NEAR_EDITS = 0.1, 16, (0.01, 0.06)
"""The same of near copies, and the fraction of their words that is changed."""
PASSAGES, PASSAGE_FRAC, PASSAGE_CHARACTERS = 12, 0.4, 600
"""Passages that are on many pages, as licences and footers are, and the fraction of the pages that have one."""


@dataclass(frozen=True)
class Page:
    """A page of a file."""

    file: str
    text: str
    is_changelog: bool
    """True for a change log or release notes."""


def unpacked(folder: Path) -> dict[str, str]:
    """Download and unpack the packages below ``folder`` unless they are there; return their versions."""
    versions = {}
    for name in PACKAGES:
        file = package(folder / "packages", name, None)
        versions[name] = file.name.split("_")[1].replace("%3a", ":")
        if not (folder / name).exists():
            partial = folder / f"{name}.partial"
            subprocess.run(["dpkg-deb", "-x", str(file), str(partial)], check=True)
            partial.rename(folder / name)
    return versions


def pages_of(folder: Path, name: str) -> list[Page]:
    """Return the pages of a package: consecutive paragraphs of a file, ``PAGE_CHARACTERS`` or a few more."""
    pages = []
    for path in sorted((folder / name).rglob("*")):
        lower = path.name.lower()
        is_changelog = "changelog" in lower or "delta" in lower or "RelNotes" in path.parts
        if path.is_symlink() or not (path.suffix in (".txt", ".pod") or (is_changelog and path.suffix == ".gz")):
            continue
        if ".html" in lower or "debian" in lower:
            continue
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode(
            errors="replace"
        )
        pages += [Page(f"{name}/{path.name}", page, is_changelog) for page in _cut(text)]
    return pages


def _cut(text: str) -> Iterator[str]:
    page = ""
    for paragraph in text.split("\n\n"):
        page += "\n\n" * bool(page) + paragraph.strip("\n")
        if len(page) >= PAGE_CHARACTERS:
            if len(page) <= MAX_PAGE_CHARACTERS:
                yield page
            page = ""


def taken(pages: Iterable[Page], n_characters: int) -> list[Page]:
    """Return the first pages, of so many characters together."""
    chosen = []
    for page in pages:
        if n_characters <= 0:
            break
        n_characters -= len(page.text)
        chosen.append(page)
    return chosen


def crawl(pages: Sequence[Page], passages: Sequence[Page], draw: random.Random) -> list[str]:
    """Return the texts of pages with repeats, in random order: passages, exact copies, near copies."""
    repeated = ["\n\n".join(page.text[:PASSAGE_CHARACTERS].rpartition(" ")[:1]) for page in passages[:PASSAGES]]
    texts = []
    for page in pages:
        text = page.text
        if draw.random() < PASSAGE_FRAC:
            passage = draw.choices(repeated, [1 / (rank + 1) for rank in range(len(repeated))])[0]
            text = "\n\n".join(draw.sample([text, passage], 2))
        texts.append(text)
        if draw.random() < EXACT_FRAC:
            texts += [text] * _copies(draw, EXACT_MOST)
        if draw.random() < NEAR_FRAC:
            texts += [_edited(text, draw) for _ in range(_copies(draw, NEAR_MOST))]
    draw.shuffle(texts)
    return texts


def write(path: Path, rows: Iterable[str] | Mapping[str, str]) -> None:
    """Write texts as JSONL, with their names or numbers as ids."""
    named = rows if isinstance(rows, Mapping) else {str(number): text for number, text in enumerate(rows)}
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in named.items()))


def _copies(draw: random.Random, most: int) -> int:
    numbers = range(1, most + 1)
    return draw.choices(numbers, [number**-2 for number in numbers])[0]


def _edited(text: str, draw: random.Random) -> str:
    """Return the text with a few words replaced by others of it."""
    words = text.split(" ")
    for at in draw.sample(range(len(words)), round(draw.uniform(*NEAR_EDITS) * len(words))):
        words[at] = draw.choice(words)
    return " ".join(words)
