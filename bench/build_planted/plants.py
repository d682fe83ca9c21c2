"""Plants duplicates, edits, passages, personal data and parts of evaluation items in real documents. Seeded."""

import html
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from build_planted.document import LANGUAGES, Document, head_of, is_prose, shingles, tokens, words
from build_planted.edits import edited_to
from build_planted.personal import mark, pieces

COPIES = "copies"
"""Source of planted copies in files of other formats."""
_DISTINCT_FRAC = 0.6
NEAR, FAR = (0.70, 0.97), (0.40, 0.57)
"""Jaccard similarity of edited copies, and of those that are no near-duplicates (the threshold is 0.65)."""
LICENCE = (
    "This paragraph stands for the licence that a thousand documents carry. The holder of the rights lets "
    "everybody who obtains a copy use, change, merge, publish, lend and sell it without a fee, as long as the "
    "whole of this notice, which names no year and no person, stays readable in each copy and in every larger "
    "part of one. What is written here comes as it is: nobody promises that it suits the purpose for which you "
    "chose it, that it harms no other work, or that it will be repaired. Neither those who wrote it nor those who "
    "passed it on answer for a loss, a claim or another damage, whether it follows from a contract, from a wrong, "
    "or from anything else that has to do with the use of the copy, with what was made out of it, or with "
    "dealings in either of the two, as far as the law permits."
)
_FORMATS = ("txt", "utf-16", "crlf", "gz", "zst", "row", "parquet")


class Planter:
    """Takes documents as hosts, each once, and collects ``new`` documents and the ``key`` of what was planted."""

    def __init__(self, rng: random.Random, documents: list[Document]) -> None:
        self.rng = rng
        self.new: list[Document] = []
        self.key: list[dict[str, Any]] = []
        free = [document for document in documents if document.kind in ("prose", "code")]
        rng.shuffle(free)
        self._free: dict[str, list[Document]] = {"prose": [], "code": []}
        for document in free:
            if document.kind == "code" or document.language in LANGUAGES:
                self._free[document.kind].append(document)
        self._fresh: dict[str, list[str]] = {}
        for document in self._free["prose"][:4000]:
            assert document.language is not None
            known = self._fresh.setdefault(document.language, [])
            if len(known) < 3000:
                known += [word for word in words(document.read())[:200] if word.isalpha()]

    def hosts(self, n: int, least: int, most: int, kind: str = "prose") -> Iterator[tuple[Document, str]]:
        """Yield up to ``n`` documents with their texts of so many words, which are then taken."""
        left = []
        free = self._free[kind]
        taken = 0
        while free and taken < n:
            document = free.pop()
            text = document.read()
            fits = least <= len(words(text)) <= most and (kind == "code" or is_prose(text, document.language or "en"))
            if not fits:
                left.append(document)
                continue
            taken += 1
            yield document, text
        self._free[kind] = left[::-1] + free
        self.rng.shuffle(self._free[kind])

    def change(self, document: Document, text: str, **note: Any) -> None:
        """Give a document another text, and note in the key what was planted."""
        document.text = text
        self.key.append({"id": document.key, **note})

    def add(self, original: Document, name: str, text: str, form: str, **note: Any) -> None:
        """Add a document of its own, which is compared with ``original``; its name decides the kind of file."""
        suffix = Path(original.name).suffix
        is_code = original.kind == "code"
        container = {"row": "rows.jsonl", "zst": "rows.jsonl.zst", "parquet": "rows.parquet"}.get(form)
        if is_code or container is None:
            end = suffix if is_code else ".html" if form == "html" else ".txt" if form != "gz" else ".md.gz"
            name, container = f"{form}/{name}{end}", None
        document = Document(COPIES, name, original.kind, original.language, None, text, container, [form])
        self.new.append(document)
        self.key.append({"id": document.key, "of": original.key, "form": form, **note})

    def exact(self, n: int) -> None:
        """Copies of texts, in other formats, encodings and sources."""
        hosts = [*self.hosts(n - n // 5, 40, 3000), *self.hosts(n // 5, 40, 3000, "code")]
        for number, (document, text) in enumerate(hosts):
            form = _FORMATS[number % len(_FORMATS)] if document.kind == "prose" else ("txt", "crlf")[number % 2]
            self.add(document, f"exact-{number}", text, form, plant="exact")
        for number, (document, text) in enumerate(self.hosts(n // 10, 60, 1000)):
            paragraphs = [part for part in re.split(r"\n\s*\n", text) if part.strip()]
            body = "\n".join(f"<p>{html.escape(part)}</p>" for part in paragraphs)
            page = f"<!doctype html><html><head><title>Copy</title></head><body><nav><a href='/'>Home</a></nav>" \
                   f"<article>{body}</article><footer>Imprint</footer></body></html>"  # fmt: skip
            self.add(document, f"page-{number}", page, "html", plant="near")

    def near(self, n: int, limits: tuple[float, float], plant: str) -> None:
        """Edited copies whose similarity to the original is within limits."""
        hosts = [*self.hosts(n - n // 5, 60, 2000), *self.hosts(n // 5, 60, 2000, "code")]
        for number, (document, text) in enumerate(hosts):
            if len(shingles(text)) < _DISTINCT_FRAC * len(words(text)):
                continue  # a repetitive text is a duplicate only of one with the same words in the same order
            head = head_of(text) if document.kind == "code" else 0
            copy = edited_to(self.rng, text[head:], *limits, self._fresh[document.language or "en"])
            if copy is not None:
                self.add(document, f"{plant}-{number}", text[:head] + copy, "row", plant=plant)

    def templates(self, n: int) -> None:
        """Documents of one template with different values: no near-duplicates."""
        rng, fresh = self.rng, self._fresh["en"]
        model = Document(COPIES, "", "prose", "en")
        for number in range(n):
            a, b, c, d = (" ".join(rng.choice(fresh) for _ in range(9)) for _ in range(4))
            text = (
                f"Report on the machine {mark(rng.randrange(10**7))} in the hall of {rng.choice(fresh)}.\n"
                f"It was seen that {a}, and that the {b} had been there before.\n"
                f"The reader of this report is asked for {c}; if it is not {d}, please write to the one who signed it."
            )
            self.add(model, f"template-{number}", text, "row", plant="far")

    def passages(self, n: int) -> None:
        """A sentence of 61 words in ``n`` documents, a licence in half as many, and paragraphs in a fiftieth each."""
        rng, fresh = self.rng, sorted(set(self._fresh["en"]))
        sentence = "Everybody should know " + " ".join(rng.choice(fresh) for _ in range(57)) + "."
        texts = [("sentence", sentence, n), ("licence", LICENCE, n // 2)]
        texts += [(f"paragraph-{i}", " ".join(rng.choice(fresh) for _ in range(80)) + ".", n // 50) for i in range(20)]
        for name, passage, copies in texts:
            least = 2 * len(tokens(passage))
            for document, text in self.hosts(max(copies, 2), least, 4000):
                self.change(document, _inserted(rng, text, passage), plant="passage", name=name, passage=passage)

    def personal(self, n: int) -> None:
        """Lines with personal data and with what looks like it, each after a line that is in no other document."""
        for number, (document, text) in enumerate(self.hosts(n, 60, 3000)):
            items = pieces(self.rng, number)
            lines = text.split("\n")
            places = sorted(self.rng.choices(range(1, len(lines) + 1), k=len(items)), reverse=True)
            for place, item in zip(places, items, strict=True):
                lines[place:place] = ["", item["mark"], item["text"].strip(), item["mark"], ""]
            self.change(document, "\n".join(lines), plant="pii", pieces=items)

    def contamination(self, n: int) -> list[str]:
        """Runs of 13 to 40 words of evaluation items, and of 12 and 12 words; returns the items."""
        items: list[str] = []
        for document, text in self.hosts(max(n // 4, 20), 60, 400):
            document.notes.append("evaluation")  # the document itself is no part of the corpus
            items.append(" ".join(text.split()))
        by_language: dict[str, list[str]] = {}
        for item in items:
            by_language.setdefault("ja" if is_prose(item, "ja") else "other", []).append(item)
        for number, (document, text) in enumerate(self.hosts(2 * n, 60, 3000)):
            group = by_language.get("ja" if document.language == "ja" else "other") or items
            item = self.rng.choice(group)
            hit = number % 2 == 0
            run = _run(self.rng, item, 13 if number % 4 == 0 else self.rng.randint(14, 40)) if hit else None
            shown = _disguised(self.rng, run) if run else _near_miss(self.rng, item)
            self.change(document, _inserted(self.rng, text, shown), plant="contaminated" if hit else "clean")
        return items


def _inserted(rng: random.Random, text: str, passage: str) -> str:
    """Put a passage between two lines, as a paragraph of its own."""
    places = [match.end() for match in re.finditer(r"\n", text)] or [len(text)]
    place = rng.choice(places)
    return f"{text[:place].rstrip()}\n\n{passage}\n\n{text[place:].lstrip(chr(10))}"


def _run(rng: random.Random, item: str, n: int) -> list[str]:
    listed = words(item)
    first = rng.randrange(max(1, len(listed) - n))
    return listed[first : first + n]


def _disguised(rng: random.Random, run: list[str]) -> str:
    """Other case, punctuation and line ends, between words that are in no item."""
    joined = "".join(f"{rng.choice((word, word.upper(), word.title()))}{rng.choice((' ', ', ', '; ', chr(10), '  '))}"
                     for word in run)  # fmt: skip
    return f"{mark(rng.randrange(10**7))} {joined}{mark(rng.randrange(10**7))}"


def _near_miss(rng: random.Random, item: str) -> str:
    """Twelve words, or twice twelve with another between."""
    run = _run(rng, item, 25)
    odd = [mark(rng.randrange(10**7)) for _ in range(3)]
    first = f"{odd[0]} {' '.join(run[:12])} {odd[1]}"
    return first if rng.random() < 0.5 else f"{first} {' '.join(run[13:25])} {odd[2]}"


def plant(documents: list[Document], n: int, seed: int, folder: Path) -> tuple[list[Document], list[dict[str, Any]]]:
    """Plant for a corpus of ``n`` documents; returns all documents and the key. Evaluation items go to ``folder``."""
    planter = Planter(random.Random(seed), documents)
    steps: list[Callable[[], Any]] = [
        lambda: planter.passages(n // 100),
        lambda: planter.exact(n // 100),
        lambda: planter.near(n // 100, NEAR, "near"),
        lambda: planter.near(n // 200, FAR, "far"),
        lambda: planter.templates(n // 400),
        lambda: planter.personal(n // 70),
    ]
    for step in steps:
        step()
    items = planter.contamination(n // 200)
    import json

    (folder / "evaluation.jsonl").write_text("".join(json.dumps({"question": item}) + "\n" for item in items))
    kept = [document for document in documents if "evaluation" not in document.notes]
    return kept + planter.new, planter.key
