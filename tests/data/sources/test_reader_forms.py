"""Every format is read as by its own reader, whose results are in the fixtures (test_readers_proof.py)."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from smalti.base.errors import DataError, UserError
from smalti.config.data import FetchConfig, SourceConfig
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.readers.index import Index
from smalti.data.sources.source import Source

FIXTURES = Path(__file__).parents[1] / "fixtures"
CASES = sorted(path.stem for path in FIXTURES.glob("*.npz"))


def config_of(case: str, folder: Path = FIXTURES, **options: object) -> SourceConfig:
    """How a user would name the data set of a fixture."""
    if "bytes" in case:
        options = {"dtype": "int64", **options}
    if "columns" in case:
        options = {"column": "tokens", **options}
    return SourceConfig(path=str(folder / case), **options)


def opened(config: SourceConfig) -> Source:
    return open_source(config, read_index(config, FetchConfig()), FetchConfig())


def test_fixtures_are_there() -> None:
    assert len(CASES) == 14


@pytest.mark.parametrize("case", CASES)
def test_a_fixture_is_read_as_its_own_reader_reads_it(case: str) -> None:
    theirs = np.load(FIXTURES / f"{case}.npz")
    source = opened(config_of(case))
    everything = source.read(0, source.n_tokens)
    assert source.n_tokens == int(theirs["lengths"].sum())
    if "tokens" in theirs:
        assert np.array_equal(everything, theirs["tokens"])
    else:  # litData: their blocks lie in their chunks, one after another
        starts = np.cumsum([0, *_chunk_tokens(case)])
        for block in (16, 33):
            begins = [b for a, e in itertools.pairwise(starts) for b in range(a, e - block + 1, block)]
            rows = np.empty((len(begins), block), source.dtype)
            source.read_rows(np.array(begins), rows)
            assert np.array_equal(rows, theirs[f"blocks_{block}"])
    random = np.random.default_rng(0)
    for length in (1, 7, 400):
        begins = random.integers(0, source.n_tokens - length + 1, 20)
        rows = np.empty((20, length), source.dtype)
        source.read_rows(begins, rows)
        assert np.array_equal(rows, np.stack([everything[b : b + length] for b in begins]))
    source.verify()
    source.close()
    assert np.array_equal(source.read(3, 5), everything[3:8])


def _chunk_tokens(case: str) -> list[int]:
    import json

    return [chunk["dim"] for chunk in json.loads((FIXTURES / case / "index.json").read_bytes())["chunks"]]


@pytest.mark.parametrize("case", CASES)
def test_documents_are_the_samples_where_these_differ_in_length(case: str) -> None:
    theirs = np.load(FIXTURES / f"{case}.npz")
    source = opened(config_of(case))
    lengths = theirs["lengths"]
    if "documents" in theirs:
        lengths = np.add.reduceat(lengths, theirs["documents"][:-1])
    if np.unique(lengths).size == 1:
        assert source.n_documents is None
        with pytest.raises(UserError, match="does not record where its documents"):
            source.documents_at(np.array([0]))
        return
    assert source.n_documents == lengths.size
    numbers = np.repeat(np.arange(lengths.size), lengths)
    assert np.array_equal(source.documents_at(np.arange(source.n_tokens)), numbers)
    ends = np.cumsum(lengths)
    assert [source.document_span(n) for n in range(lengths.size)] == list(
        zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    )
    with pytest.raises(UserError, match="allowed: 0 to"):
        source.document_span(lengths.size)


@pytest.mark.parametrize("case", CASES)
def test_the_digest_holds_across_places_and_the_index_survives_the_wire(case: str, tmp_path: Path) -> None:
    import shutil

    for path in FIXTURES.glob(f"{case}*"):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    here, there = config_of(case), config_of(case, tmp_path)
    assert opened(here).digest == opened(there).digest
    index = read_index(here, FetchConfig())
    assert Index.from_bytes(index).to_bytes() == index


def test_checked_describes_the_checks() -> None:
    assert opened(config_of("mds-fixed-int32-zstd")).checked == "whole shards (sha1, xxh64)"
    assert "no hashes" in opened(config_of("mds-varied-int64")).checked
    assert "only by verify" in opened(config_of("mds-alike-int32")).checked
    assert "no hashes" in opened(config_of("litdata-numpy-uint16")).checked


def test_a_small_vocabulary_takes_two_bytes_and_is_checked() -> None:
    assert opened(config_of("mds-alike-int32")).dtype == np.dtype("<u4")
    source = opened(config_of("mds-alike-int32", vocab_size=50_000, eod_id=0))
    assert (source.dtype, source.vocab_size, source.eod_id) == (np.dtype("<u2"), 50_000, 0)
    with pytest.raises(DataError, match=r"shard\.0000\d\.mds holds the token id [\d,]+\nallowed: 0 to 49,999"):
        source.read(0, source.n_tokens)


def test_a_column_must_be_clear() -> None:
    path = FIXTURES / "mds-columns-uint16-br"
    with pytest.raises(UserError, match="has no column 'text'\nallowed: about, tokens, z"):
        opened(SourceConfig(path=str(path), column="text"))
    with pytest.raises(UserError, match="encoded as 'json'"):
        opened(SourceConfig(path=str(path), column="about"))
    with pytest.raises(UserError, match="dtype=int64 has no effect"):
        opened(SourceConfig(path=str(path), column="tokens", dtype="int64"))
    with pytest.raises(UserError, match=r"plain bytes: set their dtype"):
        opened(SourceConfig(path=str(FIXTURES / "mds-bytes-int64-bz2"), column="tokens"))
    with pytest.raises(UserError, match=r"has no columns that can hold tokens: tokens \(bytes\)"):
        opened(SourceConfig(path=str(FIXTURES / "mds-bytes-int64-bz2")))
    with pytest.raises(UserError, match="2 columns that can hold tokens"):
        opened(SourceConfig(path=str(FIXTURES / "mds-columns-fixed-snappy")))
    with pytest.raises(UserError, match="column has no effect with format=litdata"):
        opened(SourceConfig(path=str(FIXTURES / "litdata-numpy-uint16"), column="tokens"))


def test_ranges_outside_are_refused() -> None:
    source = opened(config_of("mds-varied-int64"))
    for begin, length in ((-1, 2), (source.n_tokens - 1, 2)):
        with pytest.raises(DataError, match="are outside"):
            source.read(begin, length)
