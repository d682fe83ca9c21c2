from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_tokens import TOKENIZER, write_source

from smalti.base.errors import DataError, UserError
from smalti.data.stream.takedowns import Takedowns, overlaps
from smalti.data.tokens import TokenSource, TokenWriter


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenSource]:
    root = tmp_path_factory.mktemp("sources")
    for seed, name in enumerate(("web", "code")):
        write_source(root / name, 20, seed=seed)
    return {name: TokenSource(root / name) for name in ("web", "code")}


def _read(tmp_path: Path, text: str, sources: dict[str, TokenSource]) -> Takedowns:
    path = tmp_path / "list.jsonl"
    path.write_text(text)
    return Takedowns.read(str(path), sources)


def test_documents_become_spans_of_tokens(tmp_path: Path, sources: dict[str, TokenSource]) -> None:
    text = '{"source": "web", "document": 7}\n\n{"source": "web", "document": 0}\n{"document": 19, "source": "code"}\n'
    found = _read(tmp_path, text, sources)
    assert set(found.spans) == {"web", "code"}
    assert found.spans["web"].tolist() == [list(sources["web"].document_span(n)) for n in (0, 7)]
    assert found.spans["code"].tolist() == [[sources["code"].document_span(19)[0], sources["code"].n_tokens]]
    again = Takedowns.from_bytes(found.to_bytes())
    assert again.digest == found.digest
    assert all(np.array_equal(again.spans[name], spans) for name, spans in found.spans.items())


def test_the_digest_is_of_the_set(tmp_path: Path, sources: dict[str, TokenSource]) -> None:
    one, two, three = (f'{{"source": "web", "document": {n}}}\n' for n in (1, 2, 3))
    digest = _read(tmp_path, one + two, sources).digest
    assert _read(tmp_path, two + "\n" + one.replace(" ", "") + two, sources).digest == digest
    assert _read(tmp_path, one + three, sources).digest != digest
    assert _read(tmp_path, "", sources).spans == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not JSON"),
        ("[1]", r"line 2 is not a takedown: \[1\]"),
        ('{"source": "web"}', "line 2 is not a takedown: "),
        ('{"source": "web", "document": 1, "why": "x"}', "line 2 is not a takedown: "),
        ('{"source": "wbe", "document": 1}', "line 2: 'wbe' is not a source"),
        ('{"source": "web", "document": 20}', "line 2: source 'web' .* has no document 20"),
        ('{"source": "web", "document": -1}', "line 2: source 'web' .* has no document -1"),
        ('{"source": "web", "document": 1.5}', "line 2: 1.5 is not a document"),
        ('{"source": "web", "document": true}', "line 2: True is not a document"),
        ('{"source": ["web"], "document": 1}', r"line 2: \['web'\] is not a source"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, sources: dict[str, TokenSource], line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        _read(tmp_path, '{"source": "web", "document": 1}\n' + line + "\n", sources)


def test_documents_may_be_given_by_id(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "web", vocab_size=512, eod_id=0, tokenizer_digest=TOKENIZER) as writer:
        for number in range(9):
            writer.add(np.arange(1, 3 + number), document_id=f"page-{number % 8}")
    sources = {"web": TokenSource(tmp_path / "web")}
    found = _read(tmp_path, '{"source": "web", "document": "page-0"}\n{"source": "web", "document": 3}\n', sources)
    numbers = "".join(f'{{"source": "web", "document": {n}}}\n' for n in (8, 0, 3))
    assert _read(tmp_path, numbers, sources).digest == found.digest
    # an id that stands for two documents takes both out
    assert found.spans["web"].tolist() == [list(sources["web"].document_span(n)) for n in (0, 3, 8)]
    with pytest.raises(DataError, match=r"line 1: source 'web' .* has no document 'page-9'"):
        _read(tmp_path, '{"source": "web", "document": "page-9"}\n', sources)


def test_ids_need_a_file_of_ids(tmp_path: Path, sources: dict[str, TokenSource]) -> None:
    with pytest.raises(UserError, match=r"there is no ids\.parquet"):
        _read(tmp_path, '{"source": "web", "document": "a.py"}\n', sources)
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist"):
        Takedowns.read(str(tmp_path / "nothing.jsonl"), sources)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6),
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=4),
)
def test_overlaps_equal_a_loop_over_tokens(documents: list[tuple[int, int]], ranges: list[tuple[int, int]]) -> None:
    spans, at = [], 0
    for gap, length in documents:
        spans.append((at + gap, at + gap + length))
        at += gap + length
    spans_array = np.array(spans, dtype=np.int64).reshape(-1, 2)
    begins, lengths = (np.array(column, dtype=np.int64) for column in zip(*ranges, strict=True)) if ranges else (
        np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64),
    )  # fmt: skip
    found = {(which, t) for which, b, e in overlaps(spans_array, begins, begins + lengths) for t in range(b, e)}
    expected = {
        (which, t) for which, (b, n) in enumerate(ranges) for t in range(b, b + n) if any(x <= t < y for x, y in spans)
    }
    assert found == expected
