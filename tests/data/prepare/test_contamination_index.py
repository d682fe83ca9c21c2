"""The search for n-grams in token files: brute force, the stored index, changed files, damaged ones."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import tiny_tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from smalti.base.errors import DataError, UserError
from smalti.data.prepare.contamination import index as index_module
from smalti.data.prepare.contamination import scan as scan_module
from smalti.data.prepare.contamination.index import find_ngrams
from smalti.data.prepare.contamination.ngrams import LONG, SHORT, NgramSet, is_long, ngrams, normalised
from smalti.data.prepare.contamination.scan import Hits
from smalti.data.prepare.dedup.shingles import word_hashes
from smalti.data.tokenizer.encode import Tokenizer
from smalti.data.tokens import TokenSource, TokenWriter

TOKENIZER = tiny_tokenizer()
WORDS = ["red", "Blue", "green", "one", "two", "drei", "\u00e4hnlich"]


def write(folder: Path, texts: list[str], *, file_tokens: int = 1 << 20) -> TokenSource:
    shutil.rmtree(folder, ignore_errors=True)
    with TokenWriter(
        folder,
        vocab_size=TOKENIZER.vocab_size,
        eod_id=TOKENIZER.eod_id,
        tokenizer_digest=TOKENIZER.digest,
        salt="0" * 16,
        file_tokens=file_tokens,
    ) as writer:
        for text in texts:
            writer.add(TOKENIZER.encode(text), len(text.encode()))
    return TokenSource(folder)


class Memory:
    """The part of a ``Source`` that a scan uses."""

    dtype = np.dtype("<u2")
    eod_id = TOKENIZER.eod_id

    def __init__(self, texts: list[str]) -> None:
        ids = [id_ for text in texts for id_ in (*TOKENIZER.encode(text), self.eod_id)]
        self.ids = np.array(ids, self.dtype)
        self.n_tokens, self.n_documents = len(self.ids), len(texts)

    def read_rows(self, begins: np.ndarray, out: np.ndarray) -> None:
        (begin,) = begins.tolist()
        out[0] = self.ids[begin : begin + out.shape[1]]

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.ids == self.eod_id)])[tokens]


class WithoutEnds(Memory):
    """A source that knows its documents by number only."""

    eod_id = None

    def __init__(self, source: Memory) -> None:
        self.ids, self.n_tokens, self.n_documents = source.ids, source.n_tokens, source.n_documents

    def documents_at(self, tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.ids == TOKENIZER.eod_id)])[tokens]


def hashes_of(texts: list[str]) -> np.ndarray:
    words, text_of_word = word_hashes(normalised(pa.array(texts, pa.large_string())))
    return np.unique(np.concatenate([hashes for hashes, _ in ngrams(words, text_of_word)]))


def words_of(text: str) -> list[str]:
    return "".join(c if c.isalnum() else " " for c in text.lower()).split()


def word_runs(text: str, width: int) -> set[tuple[str, ...]]:
    words = words_of(text)
    return {tuple(words[i : i + width]) for i in range(len(words) - width + 1)}


def brute(wanted: list[str], documents: list[str]) -> set[tuple[int, int, int]]:
    """(width, document, n-grams in both) by comparing all runs of words."""
    found = set()
    for width in (SHORT, LONG):
        runs = set().union(*(word_runs(text, width) for text in wanted))
        found |= {(width, i, len(runs & word_runs(text, width))) for i, text in enumerate(documents)}
    return {row for row in found if row[2]}


def counted(hits: Hits) -> set[tuple[int, int, int]]:
    widths = np.where(is_long(hits.hashes), LONG, SHORT)
    rows = list(zip(widths.tolist(), hits.documents.tolist(), strict=True))
    return {(*row, rows.count(row)) for row in rows}


text_strategy = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from([" ", "  ", ", ", "\n", ". "])), max_size=30)
texts_strategy = st.lists(text_strategy.map(lambda pairs: "".join(w + s for w, s in pairs)), min_size=1, max_size=4)


@pytest.mark.slow
@pytest.mark.proof
@given(wanted=texts_strategy, documents=texts_strategy, span=st.sampled_from([150, 200, 1 << 20]))
def test_a_scan_finds_what_brute_force_finds(wanted, documents, span):
    source = Memory(documents)
    sources = {"s": source if span != 150 else WithoutEnds(source)}
    scanner = scan_module.Scanner(sources, TOKENIZER, NgramSet(hashes_of(wanted)))
    begins = range(0, source.n_tokens, span)
    spans = [scan_module.Span(0, "s", begin, min(begin + span, source.n_tokens)) for begin in begins]
    hits = Hits.joined([scanner.hits(part) for part in spans])
    assert counted(hits) == brute(wanted, documents)


def test_tokens_of_another_kind_are_decoded_document_by_document():
    words = [f"w{i}" for i in range(30)]
    inner = tokenizers.Tokenizer(WordLevel({"</s>": 0, **{word: i + 1 for i, word in enumerate(words)}}, "</s>"))
    inner.pre_tokenizer = WhitespaceSplit()
    tokenizer = Tokenizer(inner, "</s>")
    assert tokenizer.bytes_of_ids() is None
    source = Memory([])
    source.ids = np.array([*range(1, 9), 0, *range(9, 31), 0], source.dtype)
    source.eod_id, source.n_tokens = 0, 32
    scanner = scan_module.Scanner({"s": source}, tokenizer, NgramSet(hashes_of([" ".join(words)])))
    assert counted(scanner.hits(scan_module.Span(0, "s", 0, 32))) == brute(
        [" ".join(words)], [" ".join(words[:8]), " ".join(words[8:])]
    )


TEXTS = [" ".join(f"w{(i * 7 + j * j) % 97}" for j in range(60)) for i in range(12)]


def test_the_index_answers_again_and_scans_only_what_it_lacks(tmp_path):
    sources = {"web": write(tmp_path / "web", TEXTS, file_tokens=500), "code": write(tmp_path / "code", TEXTS[:3])}
    n_tokens = sum(source.n_tokens for source in sources.values())
    first, second = hashes_of(TEXTS[2:4]), hashes_of(TEXTS[5:6])
    shown = []
    done = find_ngrams(first, sources, TOKENIZER, tmp_path / "index", lambda *a: shown.append(a))
    assert done.scanned_tokens == done.total_tokens == n_tokens
    assert shown[-1][1:] == (n_tokens, n_tokens)
    assert counted(done.hits["web"]) == brute(TEXTS[2:4], TEXTS)
    assert counted(done.hits["code"]) == brute(TEXTS[2:4], TEXTS[:3])
    again = find_ngrams(hashes_of(TEXTS[3:4]), sources, TOKENIZER, tmp_path / "index")
    assert again.scanned_tokens == 0
    assert counted(again.hits["web"]) == brute(TEXTS[3:4], TEXTS)
    more = find_ngrams(np.union1d(first, second), sources, TOKENIZER, tmp_path / "index")
    assert more.scanned_tokens == n_tokens
    assert counted(more.hits["web"]) == brute([*TEXTS[2:4], TEXTS[5]], TEXTS)


def test_only_a_changed_token_file_is_scanned_anew(tmp_path):
    source = write(tmp_path / "web", TEXTS, file_tokens=500)
    wanted = hashes_of(TEXTS[:2])
    find_ngrams(wanted, {"web": source}, TOKENIZER, tmp_path / "index")
    changed = [*TEXTS[:-1], TEXTS[0]]
    source = write(tmp_path / "web", changed, file_tokens=500)
    assert source.manifest.n_files > 3
    search = find_ngrams(wanted, {"web": source}, TOKENIZER, tmp_path / "index")
    assert 0 < search.scanned_tokens <= 1000 + scan_module.OVERLAP_TOKENS
    assert counted(search.hits["web"]) == brute(TEXTS[:2], changed)


def test_of_a_common_ngram_the_first_documents_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(scan_module, "KEPT_DOCUMENTS", 5)
    monkeypatch.setattr(index_module, "PENDING_HITS", 3)
    monkeypatch.setattr(scan_module, "_SPAN_TOKENS", 300)
    source = write(tmp_path / "web", [TEXTS[0], *[TEXTS[1]] * 20])
    hits = find_ngrams(hashes_of(TEXTS[:2]), {"web": source}, TOKENIZER, tmp_path / "index").hits["web"]
    assert set(hits.documents.tolist()) == {0, 1, 2, 3, 4, 5}


def test_a_source_without_document_ends_is_refused(tmp_path):
    source = write(tmp_path / "web", TEXTS)
    source.n_documents = None
    with pytest.raises(UserError, match="where its documents end"):
        find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index")


def test_a_damaged_index_is_named(tmp_path):
    source = write(tmp_path / "web", TEXTS)
    find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index")
    (path,) = (tmp_path / "index" / "parts").glob("*/*.parquet")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="cannot be read"):
        find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index")
    path.unlink()
    assert find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index").scanned_tokens
    (path,) = (tmp_path / "index" / "sets").glob("*.npy")
    path.write_bytes(path.read_bytes()[:-8] + b"12345678")
    with pytest.raises(DataError, match="is damaged"):
        find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index")


def test_an_error_in_a_worker_is_raised(tmp_path):
    source = write(tmp_path / "web", TEXTS)
    path = next((tmp_path / "web").glob("*.tok"))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="check"):
        find_ngrams(hashes_of(TEXTS), {"web": source}, TOKENIZER, tmp_path / "index")
