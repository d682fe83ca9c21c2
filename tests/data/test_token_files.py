import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from made_tokens import EOD, TOKENIZER, write_source

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_file
from smalti.data.tokens import Manifest, TokenSource, TokenWriter
from smalti.data.tokens.format import BLOCK_BYTES, HEADER_BYTES, Header, pack_header, unpack_header

VOCAB = 70_000


def _write(folder: Path, tokens: np.ndarray, *, vocab_size: int = VOCAB, file_tokens: int = 1 << 28) -> Manifest:
    """One document whose tokens and end-of-document token are ``tokens`` and a 0."""
    with TokenWriter(
        folder, vocab_size=vocab_size, eod_id=EOD, tokenizer_digest=TOKENIZER, file_tokens=file_tokens
    ) as writer:
        writer.add(tokens)
    return Manifest.load(folder)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """100,001 tokens of 4 bytes in three files of 7 blocks at most."""
    folder = tmp_path_factory.mktemp("tokens") / "source"
    tokens = np.random.default_rng(1).integers(1, VOCAB, 100_000)
    _write(folder, tokens, file_tokens=45_000)
    return folder, np.append(tokens, EOD)


@pytest.fixture
def copied(written: tuple[Path, np.ndarray], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "copy"))


def test_documents_come_back_with_their_ends(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "s", vocab_size=300, eod_id=7, tokenizer_digest=TOKENIZER) as writer:
        writer.add(np.array([1, 2, 3]), n_text_bytes=9)
        writer.add([299], n_text_bytes=1)
        writer.add(np.array([], dtype=np.int64))
    source = TokenSource(tmp_path / "s")
    assert source.read(0, source.n_tokens).tolist() == [1, 2, 3, 7, 299, 7, 7]
    manifest = source.manifest
    assert (manifest.n_documents, manifest.n_text_bytes, manifest.n_tokens, manifest.dtype) == (3, 10, 7, "u16")
    assert (manifest.eod_id, manifest.vocab_size, manifest.tokenizer_digest) == (7, 300, TOKENIZER)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "u16"), (65_537, "u32")])
def test_width_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    manifest = _write(tmp_path / "s", np.array([1, vocab_size - 1]), vocab_size=vocab_size)
    assert manifest.dtype == dtype
    assert TokenSource(tmp_path / "s").read(0, 3).tolist() == [1, vocab_size - 1, EOD]


def test_any_range_reads_what_was_written(written: tuple[Path, np.ndarray], proof) -> None:
    folder, tokens = written
    source = TokenSource(folder)
    assert [file.n_tokens for file in source.manifest.files] == [45_000, 45_000, 10_001]
    rng = np.random.default_rng(2)
    edges = [0, 1, 16_383, 16_384, 16_385, 44_999, 45_000, 45_001, 90_000, 100_000, 100_001]
    for _ in range(proof(300, 20_000)):
        begin, end = np.sort(rng.choice(edges, 2) if rng.random() < 0.3 else rng.integers(0, tokens.size + 1, 2))
        got = source.read(int(begin), int(end - begin))
        assert got.dtype == np.int64
        assert np.array_equal(got, tokens[begin:end])


def test_small_additions_equal_one_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_source(tmp_path / "one", 500, file_tokens=3_000)
    monkeypatch.setattr("smalti.data.tokens.writer._FLUSH_TOKENS", 100)
    many = write_source(tmp_path / "many", 500, file_tokens=3_000)
    assert one == many


def test_manifest_digests_are_those_of_the_files(written: tuple[Path, np.ndarray]) -> None:
    folder, _ = written
    manifest = Manifest.load(folder)
    assert manifest.digest == manifest.content_digest()
    for file in manifest.files:
        assert file.digest == sha256_file(folder / file.name)
        assert file.n_bytes == (folder / file.name).stat().st_size
    TokenSource(folder).verify()


def test_reading_outside_is_an_error(written: tuple[Path, np.ndarray]) -> None:
    source = TokenSource(written[0])
    for begin, n in ((-1, 2), (100_001, 1), (0, 100_002)):
        with pytest.raises(DataError, match="allowed: 0 to 100,001"):
            source.read(begin, n)


def test_every_flipped_bit_is_noticed(copied: Path, proof) -> None:
    path = copied / "tokens-00001.tok"
    whole = path.read_bytes()
    rng = np.random.default_rng(3)
    for _ in range(proof(40, 3_000)):
        at = int(rng.integers(len(whole)))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"tokens-00001\.tok"):
            TokenSource(copied).read(0, 100_001)


def test_a_bad_block_is_named_and_the_rest_still_reads(copied: Path) -> None:
    path = copied / "tokens-00001.tok"
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + BLOCK_BYTES + 17)
        file.write(b"\xff")
    source = TokenSource(copied)
    with pytest.raises(DataError) as caught:
        source.read(45_000 + 20_000, 4)
    assert "tokens-00001.tok is corrupt: block 1 (bytes 69,632 to 135,168)" in str(caught.value)
    assert "hint: copy the file again" in str(caught.value)
    source.read(45_000, 16_384)
    source.read(45_000 + 2 * 16_384, 100)


def test_damage_after_opening_is_noticed_on_the_next_read(copied: Path) -> None:
    source = TokenSource(copied)
    source.read(0, 10)
    with (copied / "tokens-00000.tok").open("r+b") as file:
        file.seek(HEADER_BYTES + 3)
        file.write(b"\x77")
    with pytest.raises(DataError, match="block 0"):
        source.read(0, 10)
    os.truncate(copied / "tokens-00000.tok", HEADER_BYTES + 100)
    with pytest.raises(DataError, match="truncated"):
        source.read(0, 10)


@pytest.mark.parametrize("keep", [0, 7, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1000, -1])
def test_truncated_file_is_refused_at_open(copied: Path, keep: int) -> None:
    path = copied / "tokens-00002.tok"
    size = path.stat().st_size
    os.truncate(path, keep if keep >= 0 else size + keep)
    with pytest.raises(DataError, match=rf"tokens-00002\.tok is truncated: .* {size:,} expected"):
        TokenSource(copied)


def test_missing_long_and_foreign_files_are_refused(copied: Path, tmp_path: Path) -> None:
    first, second = copied / "tokens-00000.tok", copied / "tokens-00001.tok"
    kept = first.read_bytes()
    first.write_bytes(kept + b"x")
    with pytest.raises(DataError, match=r"tokens-00000\.tok is too long"):
        TokenSource(copied)
    shutil.copy(second, first)
    with pytest.raises(DataError, match=r"tokens-00000\.tok is not the file that the manifest lists"):
        TokenSource(copied)
    first.unlink()
    with pytest.raises(DataError, match=r"tokens-00000\.tok does not exist"):
        TokenSource(copied)
    first.write_bytes(kept)
    TokenSource(copied)


def test_manifest_that_was_changed_is_refused(copied: Path) -> None:
    path = copied / "manifest.json"
    whole = json.loads(path.read_text())
    for key, value, message in (
        ("eod_id", 5, "digest does not match"),
        ("format", 99, "format 99"),
        ("files", [{**whole["files"][0], "name": "../secret.tok"}], "plain names"),
        ("more", 1, "not a manifest"),
    ):
        path.write_text(json.dumps({**whole, key: value}))
        with pytest.raises(DataError, match=message):
            Manifest.load(copied)
    path.write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        Manifest.load(copied)


def test_folder_without_manifest_is_no_data_set(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no token files"):
        TokenSource(tmp_path)


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(DataError, match="the corpus is empty"),
        TokenWriter(tmp_path / "s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER),
    ):
        pass
    assert os.listdir(tmp_path / "s") == []


def test_writer_refuses_wrong_input(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER)
    for ids, message in (
        ([10], "id 10"),
        ([-1], "id -1"),
        ([1, 0, 2], "end-of-document id"),
        ([0.5], "float64"),
        ([[1]], r"\(1, 1\)"),
    ):
        with pytest.raises(DataError, match=message):
            writer.add(np.array(ids))
    writer.abort()
    for wrong in ({"eod_id": 10}, {"vocab_size": 0}, {"tokenizer_digest": "x"}, {"file_tokens": 0}):
        options = {"vocab_size": 10, "eod_id": 0, "tokenizer_digest": TOKENIZER, **wrong}
        with pytest.raises(UserError, match=next(iter(wrong))):
            TokenWriter(tmp_path / "t", **options)
    with pytest.raises(UserError, match="local folder"):
        TokenWriter("s3://bucket/s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER)


def test_finished_folder_is_not_written_again(copied: Path) -> None:
    with pytest.raises(UserError, match="already holds"):
        TokenWriter(copied, vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER)


def test_error_while_writing_leaves_no_data_set(tmp_path: Path) -> None:
    def write() -> None:
        with TokenWriter(tmp_path / "s", vocab_size=10, eod_id=0, tokenizer_digest=TOKENIZER, file_tokens=5) as writer:
            writer.add(np.ones(12, dtype=np.int64))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        TokenSource(tmp_path / "s")


def test_killed_writer_leaves_no_data_set_and_can_be_repeated(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\n"
        "from smalti.data.tokens import TokenWriter\n"
        "w = TokenWriter(sys.argv[1], vocab_size=512, eod_id=0, tokenizer_digest='ab' * 32, file_tokens=1 << 20)\n"
        "ids = np.ones(1 << 19, dtype=np.int64)\n"
        "for i in range(10**9):\n"
        "    w.add(ids)\n"
        "    if i == 7: print('going', flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "going\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with pytest.raises(DataError, match=r"manifest\.json is missing"):
        TokenSource(tmp_path / "s")
    write_source(tmp_path / "s", 20)
    TokenSource(tmp_path / "s").verify()


def test_reads_from_an_object_store_verify_too(copied: Path, written: tuple[Path, np.ndarray]) -> None:
    memory = fsspec.filesystem("memory")
    for path in copied.iterdir():
        memory.pipe_file(f"/tokens/{path.name}", path.read_bytes())
    source = TokenSource("memory://tokens")
    assert np.array_equal(source.read(44_000, 50_000), written[1][44_000:94_000])
    damaged = bytearray((copied / "tokens-00000.tok").read_bytes())
    damaged[HEADER_BYTES + 5] ^= 4
    memory.pipe_file("/tokens/tokens-00000.tok", bytes(damaged))
    with pytest.raises(DataError, match=r"memory://tokens/tokens-00000\.tok is corrupt: block 0"):
        source.read(0, 5)


def test_a_damaged_transfer_is_tried_once_more(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smalti.base import store

    memory = fsspec.filesystem("memory")
    for path in copied.iterdir():
        memory.pipe_file(f"/again/{path.name}", path.read_bytes())
    source = TokenSource("memory://again")
    expected = source.read(0, 5)
    intact, calls = store.read_range, []

    def flaky(url: str, start: int, length: int) -> bytes:
        data = bytearray(intact(url, start, length))
        if not calls:
            data[3] ^= 1
        calls.append(start)
        return bytes(data)

    monkeypatch.setattr(store, "read_range", flaky)
    assert np.array_equal(source.read(0, 5), expected)
    assert len(calls) == 2


def test_header_round_trip_and_versions() -> None:
    header = Header(2, 123, 5, TOKENIZER)
    data = pack_header(header)
    assert len(data) == HEADER_BYTES
    assert unpack_header(data, "f") == header
    with pytest.raises(DataError, match="not a token file"):
        unpack_header(b"PAR1" + data[4:], "f")


def test_threads_share_a_source(written: tuple[Path, np.ndarray]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    folder, tokens = written
    source = TokenSource(folder)
    begins = np.random.default_rng(4).integers(0, 99_000, 200).tolist()
    with ThreadPoolExecutor(8) as pool:
        for begin, got in zip(begins, pool.map(lambda b: source.read(b, 1000), begins), strict=True):
            assert np.array_equal(got, tokens[begin : begin + 1000])
