"""A synthetic corpus in which every near-duplicate was planted: recall and precision of a deduplication are known.

Equal arguments give equal documents on every machine; a planted copy has one partner, and a partner one copy;
everything else is unrelated. It is fast (100,000 documents in seconds) and needs no file. Words are made up, with the
frequencies of a language (Zipf) and none of its grammar.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]

KINDS = ("base", "exact", "edited", "boilerplate", "book", "sentence")

SHARE = {"base": 0.74, "exact": 0.1, "edited": 0.1, "boilerplate": 0.05, "book": 0.0002, "sentence": 0.0098}
"""Share of documents of each kind, unless other ones are asked for."""

EDITED_FRAC = 0.05
"""Share of the partner's words that an edited copy has replaced, inserted or deleted."""

SENTENCE_WORDS = 61

_VOCABULARY = 50_000
_BOOK_VOCABULARY = 2_000
_DRAWS = 1 << 20  # resolution of the table that turns a random integer into a word


@dataclass(frozen=True)
class PlantedDocument:
    """A document and what is known about it."""

    id: str
    text: str
    kind: str
    """One of KINDS; the partner of a copy is of kind ``base`` (or ``sentence``)."""
    partner: str | None = None
    """Id of the document that this one is a copy of; either of the two may be the one that stays."""


def planted(n_documents: int, *, seed: int = 0, share: dict[str, float] | None = None) -> list[PlantedDocument]:
    """``n_documents`` in random order, ids counting up in that order.

    ``share`` gives kind -> share of the documents, adding up to 1 (a kind that is left out has none); every kind with a
    share has two documents or more. Kinds: ``base`` unrelated; ``exact`` a copy; ``edited`` a copy with 5 % of its
    words replaced, inserted or deleted; ``boilerplate`` unrelated bodies under one of few headers and footers (up to
    40 % of the words); ``book`` 20,000 to 100,000 words from one small vocabulary; ``sentence`` the same 61 words among
    a text of its own, and in every other document of that kind those words alone (copies of one another).
    """
    counts = _counts(n_documents, SHARE if share is None else share)
    n_copies = counts["exact"] + counts["edited"]
    if n_copies > counts["base"]:
        raise ValueError(f"{n_copies} copies need as many documents of kind base, there are {counts['base']}")
    base = _texts(seed, "base", counts["base"])
    partners = _generator(seed, "partners").permutation(counts["base"])[:n_copies].tolist()
    made: list[tuple[str, Words, int | None]] = [("base", words, None) for words in base]
    made += [("exact", base[partner], partner) for partner in partners[: counts["exact"]]]
    rng = _generator(seed, "edits")
    made += [("edited", edited(base[partner], rng), partner) for partner in partners[counts["exact"] :]]
    made += [("boilerplate", words, None) for words in _boilerplate(seed, counts["boilerplate"])]
    made += [("book", words, None) for words in _books(seed, counts["book"])]
    sentence = _sentence(seed)
    alone = len(made)
    for number, body in enumerate(_texts(seed, "sentence", counts["sentence"])):
        if number % 2 == 0:
            made.append(("sentence", sentence, alone if number else None))
        else:
            made.append(("sentence", _around(body, sentence), None))
    return _shuffled(made, seed)


def sentence_trap(repeats: int = 60_000, *, seed: int = 0) -> list[PlantedDocument]:
    """One 61-word sentence ``repeats`` times over in one document, in as many documents of their own, and alone.

    The first document is the long one. No word is counted as its near-duplicate here: as a set of words in a row it is
    nearly the sentence alone, and whether it goes is the deduplication's own affair (``score`` passes over it).
    """
    sentence = _sentence(seed)
    text = _texts_of([sentence])[0]
    documents = [PlantedDocument("long", " ".join([text] * repeats), "sentence")]
    bodies = _texts(seed, "trap", repeats)
    among = _texts_of([_around(body[:120], sentence) for body in bodies])
    documents += [PlantedDocument(f"among-{i:06d}", text, "sentence") for i, text in enumerate(among)]
    documents.append(PlantedDocument("alone-000000", text, "sentence"))
    copies = (f"alone-{i:06d}" for i in range(1, repeats))
    return documents + [PlantedDocument(name, text, "sentence", "alone-000000") for name in copies]


@dataclass(frozen=True)
class Score:
    """What a deduplication got right among the documents of one kind."""

    planted: int
    """Documents that had to go: all but one of each group of copies."""
    found: int
    """Of these, how many went."""
    wrong: int
    """Documents that went though nothing like them was left."""

    @property
    def recall(self) -> float:
        """Found among planted; 1 when nothing was planted."""
        return self.found / self.planted if self.planted else 1.0

    @property
    def precision(self) -> float:
        """Found among removed; 1 when nothing was removed."""
        return self.found / (self.found + self.wrong) if self.found + self.wrong else 1.0


def score(documents: Sequence[PlantedDocument], removed: Collection[str]) -> dict[str, Score]:
    """Kind -> score, and ``"all"``. A group of copies counts for the kind of the copies, whichever of them stays."""
    gone = set(removed)
    groups: dict[str, list[str]] = {}
    kind_of: dict[str, str] = {}
    for document in documents:
        root = document.partner or document.id
        groups.setdefault(root, []).append(document.id)
        if document.partner or root not in kind_of:
            kind_of[root] = document.kind
    planted_, found, wrong = Counter[str](), Counter[str](), Counter[str]()
    for root, members in groups.items():
        if root == "long":
            continue
        n_gone, n_needed = sum(member in gone for member in members), len(members) - 1
        for kind in (kind_of[root], "all"):
            planted_[kind] += n_needed
            found[kind] += min(n_gone, n_needed)
            wrong[kind] += max(n_gone - n_needed, 0)
    return {kind: Score(planted_[kind], found[kind], wrong[kind]) for kind in (*KINDS, "all") if kind in planted_}


def write_parquet(
    documents: Iterable[PlantedDocument], folder: str | Path, files: int = 4, *, heldout: Collection[str] = ()
) -> Path:
    """Write what ``smalti data curate`` would leave: ``files`` sources ``part-0``... with the documents dealt in turn.

    Ids named in ``heldout`` go to the held-out split, all others to training. Returns the folder.
    """
    from smalti.base.hashing import digest_json, sha256_file
    from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN
    from smalti.data.documents.parquet import DOCUMENT_SCHEMA, DROP_SCHEMA, RowWriter
    from smalti.data.documents.publish import publication
    from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report

    dealt: list[list[PlantedDocument]] = [[] for _ in range(files)]
    for number, document in enumerate(documents):
        dealt[number % files].append(document)
    report = Report()
    with publication(str(folder), kind=FORMAT_KIND, record_name=RECORD_NAME) as result:
        for number, part in enumerate(dealt):
            name = f"part-{number}"
            with RowWriter(result.work / "drops" / f"{name}.parquet", DROP_SCHEMA):
                pass
            for split in SPLITS:
                account = report.of(name, split)
                with RowWriter(result.work / "documents" / name / f"{split}.parquet", DOCUMENT_SCHEMA) as writer:
                    for document in part:
                        if split != (HELDOUT if document.id in heldout else TRAIN):
                            continue
                        n_bytes = len(document.text.encode())
                        account.keep(n_bytes, n_bytes)
                        row = {"id": document.id, "text": document.text, "group": document.id, "n_bytes": n_bytes}
                        writer.add(row, n_bytes)
        paths = sorted(result.work.rglob("*.parquet"))
        result.record = report.as_json() | {
            "files": {path.relative_to(result.work).as_posix(): sha256_file(path) for path in paths}
        }
        result.record["digest"] = digest_json(result.record["files"])
    return Path(folder)


def edited(words: Words, rng: np.random.Generator, frac: float = EDITED_FRAC) -> Words:
    """``words`` with ``frac`` of them (one at least) replaced, deleted, or followed by a new one, in equal shares."""
    n_edits = max(1, round(frac * len(words)))
    places = rng.choice(len(words), n_edits, replace=False)
    what = rng.integers(3, size=n_edits)
    new = rng.integers(_VOCABULARY, size=n_edits, dtype=np.int32)
    result = words.copy()
    result[places[what == 0]] = new[what == 0]
    result[places[what == 1]] = -1
    result = np.insert(result, places[what == 2] + 1, new[what == 2])
    return result[result >= 0]


def _counts(n_documents: int, share: dict[str, float]) -> dict[str, int]:
    unknown = share.keys() - set(KINDS)
    if unknown or abs(sum(share.values()) - 1) > 1e-6:
        raise ValueError(f"shares {share} are not shares of {', '.join(KINDS)} that add up to 1")
    counts = dict.fromkeys(KINDS, 0)
    for kind, frac in share.items():
        counts[kind] = max(2, round(frac * n_documents)) if frac else 0
    largest = max(counts, key=lambda kind: counts[kind])
    counts[largest] += n_documents - sum(counts.values())
    return counts


def _generator(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])


def _table(vocabulary: int) -> Words:
    """Random integer below _DRAWS -> word, with Zipf's frequencies."""
    shares = 1 / np.arange(1, vocabulary + 1)
    cumulative = np.cumsum(shares / shares.sum())
    words = np.searchsorted(cumulative, (np.arange(_DRAWS) + 0.5) / _DRAWS)
    return words.astype(np.int32)


def _draw(rng: np.random.Generator, n_words: int, table: Words) -> Words:
    return table[rng.integers(_DRAWS, size=n_words, dtype=np.uint32)]


def _lengths(rng: np.random.Generator, n_documents: int) -> npt.NDArray[np.int64]:
    return np.clip(rng.lognormal(np.log(220), 0.9, n_documents), 50, 2000).astype(np.int64)


def _texts(seed: int, purpose: str, n_documents: int) -> list[Words]:
    """Unrelated documents: words, some of which end a sentence or a paragraph."""
    rng = _generator(seed, purpose)
    lengths = _lengths(rng, n_documents)
    words = _punctuated(rng, _draw(rng, int(lengths.sum()), _table(_VOCABULARY)))
    return np.split(words, np.cumsum(lengths)[:-1]) if n_documents else []


def _punctuated(rng: np.random.Generator, words: Words) -> Words:
    """Each 14th word or so ends a sentence, each fifth sentence a paragraph: the words above _VOCABULARY."""
    ends = rng.integers(70, size=len(words), dtype=np.uint8)
    return words + _VOCABULARY * ((ends < 5).astype(np.int32) + (ends < 1))


def _boilerplate(seed: int, n_documents: int) -> list[Words]:
    rng = _generator(seed, "templates")
    templates = _texts(seed, "template texts", 1 + n_documents // 200)
    made = []
    for body in _texts(seed, "boilerplate", n_documents):
        template = templates[rng.integers(len(templates))]
        template = template[: len(body) * 2 // 3]  # at most 40 % of the whole
        header = len(template) * 3 // 5
        made.append(np.concatenate([template[:header], body, template[header:]]))
    return made


def _books(seed: int, n_documents: int) -> list[Words]:
    rng = _generator(seed, "books")
    table = _table(_BOOK_VOCABULARY)
    return [_punctuated(rng, _draw(rng, int(rng.integers(20_000, 100_000)), table)) for _ in range(n_documents)]


def _sentence(seed: int) -> Words:
    words = _draw(_generator(seed, "the sentence"), SENTENCE_WORDS, _table(_VOCABULARY))
    words[-1] += _VOCABULARY
    return words


def _around(body: Words, sentence: Words) -> Words:
    middle = len(body) // 2
    return np.concatenate([body[:middle], sentence, body[middle:]])


def _shuffled(made: list[tuple[str, Words, int | None]], seed: int) -> list[PlantedDocument]:
    order = _generator(seed, "order").permutation(len(made))
    number_of = np.argsort(order).tolist()
    texts = _texts_of([made[i][1] for i in order.tolist()])

    def name(i: int | None) -> str | None:
        return None if i is None else f"doc-{number_of[i]:07d}"

    return [
        PlantedDocument(f"doc-{number:07d}", text, made[i][0], name(made[i][2]))
        for number, (i, text) in enumerate(zip(order.tolist(), texts, strict=True))
    ]


def _texts_of(documents: Sequence[Words]) -> list[str]:
    words = _spelled()
    spell: Callable[[int], str] = words.__getitem__
    return [" ".join(map(spell, document.tolist())).replace("\n ", "\n").rstrip("\n") for document in documents]


def _spelled() -> list[str]:
    """The words: frequent ones short; then each with a full stop; then each at the end of a paragraph."""
    syllables = [a + b + c for c in ("", "n", "r", "s") for a in "bcdfghjklmnprstvwxyz" for b in "aeiou"]
    n = len(syllables)
    plain = syllables + [syllables[i % n] + syllables[i // n] for i in range(_VOCABULARY - n)]
    return [word + end for end in ("", ".", ".\n\n") for word in plain]
