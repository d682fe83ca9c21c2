from bisect import bisect_left
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.base.errors import DataError, UserError
from smalti.data.pack import best_fit
from smalti.data.pack.build import pack_source
from smalti.data.pack.index import PackIndex, PackRecord, pack_folder, read_record

EOD = 0


class MadeSource:
    """Tokens in memory that answer as a source does."""

    tokenizer_digest, vocab_size, checked = None, None, "nothing"

    def __init__(self, tokens: list[int] | np.ndarray, where: Path | str = "made", eod_id: int | None = EOD) -> None:
        self.tokens = np.array(tokens, dtype=np.uint16)
        self.where, self.eod_id, self.dtype, self.n_tokens = str(where), eod_id, np.dtype("<u2"), self.tokens.size
        self.digest = f"{hash(self.tokens.tobytes()) & (1 << 60) - 1:064x}"
        self.n_documents = None

    def read_rows(self, begins: np.ndarray, out: np.ndarray) -> None:
        for row, begin in zip(out, begins, strict=True):
            row[:] = self.tokens[begin : begin + row.size]


def _reference(lengths: list[int], seq_len: int) -> list[int]:
    """Best-fit decreasing as in the book: the room left in each row, one piece after another."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        at = bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else seq_len
        rooms.insert(bisect_left(rooms, room - length), room - length)
    return rooms


lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@pytest.mark.slow
@pytest.mark.proof
@given(lengths_of_documents, st.integers(2, 24))
def test_rows_are_those_of_the_book_and_hold_every_token_once(documents: list[int], seq_len: int) -> None:
    ends = np.cumsum(documents)
    rows = best_fit.pack(ends, seq_len)
    pieces = [part for n in documents for part in [seq_len] * (n // seq_len) + [n % seq_len] * (n % seq_len > 0)]
    assert sorted(rows.lengths.tolist()) == sorted(pieces)
    owner = np.repeat(np.arange(rows.starts.size - 1), np.diff(rows.starts))
    used = np.bincount(owner, weights=rows.lengths)
    assert sorted((seq_len - used).astype(int).tolist()) == _reference(pieces, seq_len)
    covered = np.concatenate([np.arange(b, b + n) for b, n in zip(rows.begins, rows.lengths, strict=True)])
    assert np.array_equal(np.sort(covered), np.arange(ends[-1]))
    # a document that fits is whole, one that does not is cut at its own multiples of seq_len
    whole = {(int(e) - n, n) for e, n in zip(ends, documents, strict=True) if n <= seq_len}
    assert whole <= set(zip(rows.begins.tolist(), rows.lengths.tolist(), strict=True))
    # pieces of a row stand in the order of the corpus, and `places` leads from the corpus to the rows
    for first, last in zip(rows.starts[:-1], rows.starts[1:], strict=True):
        assert np.all(np.diff(rows.begins[first:last]) > 0)
    assert np.all(np.diff(rows.begins[rows.places]) > 0)


@pytest.mark.proof
@given(lengths_of_documents, st.integers(2, 24))
def test_documents_cut_by_chopping_are_counted(documents: list[int], seq_len: int) -> None:
    ends, cut, begin = np.cumsum(documents), 0, 0
    for end in ends.tolist():
        cut += len({(token - 1) // seq_len for token in range(max(begin, 1), end)}) > 1
        begin = end
    assert best_fit.n_cut_by_chopping(ends, seq_len) == cut


@pytest.mark.parametrize("scan_tokens", [1, 3, 100])
def test_ends_of_documents(scan_tokens: int) -> None:
    assert best_fit.document_ends(MadeSource([5, EOD, EOD, 7, 8, EOD]), EOD, scan_tokens=scan_tokens).tolist() == [
        2,
        3,
        6,
    ]
    assert best_fit.document_ends(MadeSource([5, EOD, 7]), EOD, scan_tokens=scan_tokens).tolist() == [2, 3]
    assert best_fit.document_ends(MadeSource([5, 6]), EOD, scan_tokens=scan_tokens).tolist() == [2]


# --------------------------------------------------------------------------------------------- the artefact


def _made(folder: Path, n: int = 3000, seq_len: int = 64, seed: int = 1) -> tuple[MadeSource, Any]:
    rng = np.random.default_rng(seed)
    tokens = np.concatenate([np.append(rng.integers(1, 500, rng.integers(0, 150)), EOD) for _ in range(n)])
    folder.mkdir(parents=True, exist_ok=True)
    source = MadeSource(tokens, folder)
    return source, pack_source(source, seq_len)


def _open(source: MadeSource, seq_len: int = 64) -> PackIndex:
    data = read_record(source.where, seq_len)
    record = PackRecord.parse(data, "pack.json", source_digest=source.digest, source=source.where, seq_len=seq_len)
    return PackIndex(record, pack_folder(source.where, seq_len))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    source, packing = _made(tmp_path / "a")
    packing.write()
    index, rows = _open(source), packing.rows
    index.verify()
    assert index.n_rows == rows.starts.size - 1
    owner, begins, lengths = index.pieces(np.arange(index.n_rows))
    assert np.array_equal(owner, np.repeat(np.arange(index.n_rows), np.diff(rows.starts)))
    assert np.array_equal(begins, rows.begins)
    assert np.array_equal(lengths, rows.lengths)
    owner, begins, lengths = index.pieces(np.array([7, 3]))
    expected = [np.arange(rows.starts[r], rows.starts[r + 1]) for r in (7, 3)]
    assert begins.tolist() == rows.begins[np.concatenate(expected)].tolist()
    assert owner.tolist() == [0] * expected[0].size + [1] * expected[1].size
    assert sorted(path.name.split(".")[0] for path in (tmp_path / "a/packs/64").iterdir()) == [
        "begins", "lengths", "pack", "places", "starts",
    ]  # fmt: skip


def test_rows_of_a_range_of_tokens(tmp_path: Path) -> None:
    source, packing = _made(tmp_path / "a", n=40)
    packing.write()
    index, rows = _open(source), packing.rows
    owner = np.repeat(np.arange(index.n_rows), np.diff(rows.starts))
    for begin in range(0, source.n_tokens, 31):
        for end in (begin + 1, begin + 40, source.n_tokens):
            touched = (rows.begins < end) & (rows.begins + rows.lengths > begin)
            assert index.rows_of(begin, end).tolist() == sorted(set(owner[touched].tolist()))


def test_packing_again_gives_the_same_files(tmp_path: Path) -> None:
    source, packing = _made(tmp_path / "a", n=50)
    packing.write()
    folder = tmp_path / "a/packs/64"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    pack_source(source, 64).write()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_wrong_and_stale_indexes_are_refused(tmp_path: Path) -> None:
    source, packing = _made(tmp_path / "a", n=50)
    with pytest.raises(DataError, match="no best-fit index for sequences of 64 tokens") as caught:
        _open(source)
    assert caught.value.hint == f"smalti data pack {source.where} --seq-len 64"
    packing.write()
    source.digest = "f" * 64
    with pytest.raises(DataError, match="is the index of tokens with"):
        _open(source)
    source, packing = _made(tmp_path / "b", n=50)
    packing.write()
    record = tmp_path / "b/packs/64/pack.json"
    text = record.read_text()
    for old, new, message in (
        ("best-fit-decreasing/1", "best-fit-decreasing/0", "was written by best-fit-decreasing/0"),
        ('"n_documents": 50', '"n_documents": 51', "its digest does not match"),
        ('"complete": true', '"complete": false', "is incomplete"),
        ("{", "[", "is not the record of a pack index"),
        ('"n_rows"', '"rows"', "is not the record of a pack index"),
    ):
        assert old in text
        record.write_text(text.replace(old, new, 1))
        with pytest.raises(DataError, match=message):
            _open(source)
    (tmp_path / "b/packs/32").mkdir()
    (tmp_path / "b/packs/32/pack.json").write_text(text)
    with pytest.raises(DataError, match="packs sequences of 64 tokens, not 32"):
        _open(source, 32)


def _read_all(index: PackIndex) -> None:
    for row in range(index.n_rows):
        index.pieces(np.array([row]))
    index.rows_of(0, 1 << 40)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path) -> None:
    source, packing = _made(tmp_path / "a", n=400)
    packing.write()
    rng = np.random.default_rng(3)
    files = sorted((tmp_path / "a/packs/64").glob("*.col"))
    assert len(files) == 4
    for path in files:
        data = bytearray(path.read_bytes())
        for _ in range(10):
            at, bit = int(rng.integers(len(data))), 1 << int(rng.integers(8))
            data[at] ^= bit
            path.write_bytes(data)
            index = _open(source)
            with pytest.raises(DataError, match=rf"{path.name} is corrupt: block {at // 4096} "):
                _read_all(index)
            with pytest.raises(DataError, match="is corrupt: its SHA-256"):
                _open(source).verify()
            data[at] ^= bit
            path.write_bytes(data)
        path.write_bytes(data[:-4096])
        with pytest.raises(DataError, match=f"{path.name} has "):
            _read_all(_open(source))
        path.unlink()
        with pytest.raises(DataError, match=f"{path.name} is missing"):
            _read_all(_open(source))
        path.write_bytes(data)


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no end-of-document token"):
        pack_source(MadeSource([1, 2, 3], eod_id=None), 4)
    with pytest.raises(UserError, match="cannot be written to s3://bucket/x"):
        pack_source(MadeSource([1, 2, 3], "s3://bucket/x"), 4)
    with pytest.raises(UserError, match="--seq-len 1"):
        pack_source(MadeSource([1, 2, 3]), 1)


def test_the_report_compares_both_ways(tmp_path: Path) -> None:
    _, packing = _made(tmp_path / "a", n=500)
    found = packing.as_json()
    assert found["documents"] == 500
    assert 0 < found["best_fit_cut_frac"] < found["concat_cut_frac"] < 1
    assert found["best_fit_padding_frac"] == pytest.approx(1 - found["tokens"] / (found["best_fit_sequences"] * 64))
    assert not (tmp_path / "a/packs").exists()
