"""Ids of documents beside the tokens: found both ways, checked, and never in the way of training."""

import hashlib
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from random_tokens import TOKENIZER, write_source

from smalti.base import store
from smalti.base.errors import DataError, UserError
from smalti.data.tokens import TokenSource, TokenWriter
from smalti.data.tokens.document_ids import documents_of, ids_of

N = 1_000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """1,000 documents in row groups of 64; number n has the id "n", but 10 and 900 share one."""
    monkeypatch.setattr("smalti.data.tokens.document_ids._GROUP_ROWS", 64)
    with TokenWriter(tmp_path / "s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER, salt="0" * 16) as writer:
        for number in range(N):
            writer.add([1, 2], 8, "twice" if number in (10, 900) else f"ü{number}")
    return tmp_path / "s"


def test_ids_are_found_both_ways(folder: Path) -> None:
    assert ids_of(folder, [999, 0, 63, 64, 63, 10]) == ["ü999", "ü0", "ü63", "ü64", "ü63", "twice"]
    assert documents_of(folder, ["ü64", "nobody", "twice", "ü0", "ü64"]) == {"ü0": [0], "ü64": [64], "twice": [10, 900]}
    assert ids_of(folder, []) == []
    assert documents_of(folder, []) == {}
    for outside in ([-1], [0, N]):
        with pytest.raises(DataError, match="allowed: 0 to 999"):
            ids_of(folder, outside)
    TokenSource(folder).verify()


def test_of_a_store_only_ranges_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    file = BytesIO()
    names = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(1 << 16)]
    pq.write_table(
        pa.table([pa.array(names)], schema=pa.schema([pa.field("id", pa.string(), nullable=False)])),
        file, row_group_size=1 << 13, use_dictionary=False, write_page_checksum=True,
    )  # fmt: skip
    store.write_bytes("memory://ids-test/ids.parquet", file.getvalue())
    asked, read_range = [], store.read_range

    def counted(url: str, start: int, length: int) -> bytes:
        asked.append(length)
        return read_range(url, start, length)

    monkeypatch.setattr(store, "read_range", counted)
    assert ids_of("memory://ids-test", [3, 8000]) == [names[3], names[8000]]
    assert sum(asked) < len(file.getvalue()) / 4
    assert documents_of("memory://ids-test", [names[60_000]]) == {names[60_000]: [60_000]}


def test_only_the_parts_that_hold_them_are_read(folder: Path) -> None:
    path = folder / "ids.parquet"
    whole = path.read_bytes()
    column = pq.ParquetFile(path).metadata.row_group(0).column(0)
    at = column.data_page_offset + column.total_compressed_size - 5
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert ids_of(folder, [N - 1]) == ["ü999"]
    with pytest.raises(DataError, match=r"ids\.parquet cannot be read"):
        ids_of(folder, [0])
    with pytest.raises(DataError, match=r"ids\.parquet cannot be read"):
        documents_of(folder, ["ü1"])
    with pytest.raises(DataError, match=r"ids\.parquet has the SHA-256"):
        TokenSource(folder).verify()
    path.unlink()
    with pytest.raises(DataError, match=r"ids\.parquet does not exist"):
        TokenSource(folder).verify()
    TokenSource(folder).read(0, 10)


def test_ids_for_all_or_none(tmp_path: Path) -> None:
    for first, second, message in (("a", None, "document 1 has no id"), (None, "a", "document 1 has an id")):
        writer = TokenWriter(tmp_path / "s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER)
        writer.add([1], 1, first)
        with pytest.raises(DataError, match=message):
            writer.add([1], 1, second)
        writer.abort()
        assert list((tmp_path / "s").iterdir()) == []


def test_a_folder_without_ids_is_an_error(tmp_path: Path) -> None:
    write_source(tmp_path / "s", 3)
    for look in (lambda: ids_of(tmp_path / "s", [0]), lambda: documents_of(tmp_path / "s", ["a"])):
        with pytest.raises(UserError, match=r"there is no ids\.parquet"):
            look()


@pytest.mark.slow
def test_reading_tokens_imports_no_pyarrow(folder: Path) -> None:
    program = (
        "import sys, numpy as np; from smalti.data.tokens import TokenSource\n"
        "source = TokenSource(sys.argv[1]); source.read(0, 9); source.document_span(5)\n"
        "assert 'pyarrow' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True)


@pytest.mark.slow
def test_a_full_disk_leaves_no_ids(tmp_path: Path) -> None:
    program = (
        "import resource, signal, sys\n"
        "from smalti.data.tokens import TokenWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000,) * 2)\n"
        "import hashlib\n"
        "with TokenWriter(sys.argv[1], vocab_size=512, eod_id=0, tokenizer_digest='ab' * 32) as writer:\n"
        "    for n in range(100_000): writer.add([1], 1, hashlib.sha256(b'%d' % n).hexdigest())\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "s")], capture_output=True, text=True, check=False
    )
    assert "File too large" in child.stderr
    assert list((tmp_path / "s").iterdir()) == []
    assert child.returncode == 1
