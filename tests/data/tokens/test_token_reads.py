"""Reading token files: right rows, right documents, and no damaged byte that passes, wherever the files lie."""

import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from random_tokens import EOD, TOKENIZER, write_source

from smalti.base.errors import DataError, UserError
from smalti.data.fetch import Files, Range, open_files
from smalti.data.fetch.counts import Counts
from smalti.data.tokens import Manifest, TokenSource, TokenWriter
from smalti.data.tokens.format import BLOCK_BYTES, HEADER_BYTES, PAYLOAD_BYTES, block_start, file_bytes
from smalti.data.tokens.manifest import file_name

FILE_TOKENS = 45_000
N_TOKENS = 100_001


def write(folder: Path, *, vocab_size: int, eod_id: int = EOD, salt: str = "0" * 16) -> np.ndarray:
    """Documents of 0 to 30,000 tokens, N_TOKENS in all, in three files; returns all tokens."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, vocab_size, N_TOKENS)
    tokens[tokens == eod_id] = eod_id + 1
    ends = np.unique([*rng.integers(0, 60_000, 200), 17, 18, 19, 44_999, 45_000, 89_999, N_TOKENS - 1])
    tokens[ends] = eod_id
    with TokenWriter(
        folder,
        vocab_size=vocab_size,
        eod_id=eod_id,
        tokenizer_digest=TOKENIZER,
        salt=salt,
        file_tokens=FILE_TOKENS,
    ) as writer:
        for document in np.split(tokens, ends + 1)[:-1]:
            writer.add(document[:-1])
    return tokens


@pytest.fixture(scope="module", params=[512, 70_000], ids=["u16", "u32"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    folder = tmp_path_factory.mktemp("tokens") / "source"
    return folder, write(folder, vocab_size=request.param, eod_id=0 if request.param == 512 else 300)


@pytest.fixture
def copied(written: tuple[Path, np.ndarray], tmp_path: Path) -> Path:
    return Path(shutil.copytree(written[0], tmp_path / "copy"))


class Memory:
    """Files in memory that count requests and may damage what they return."""

    def __init__(self, folder: Path) -> None:
        self.where = "memory://somewhere"
        self.counts = Counts()
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.reads: list[list[Range]] = []
        self.again: list[Range] = []
        self.damage: Callable[[Range, bytearray], None] = lambda wanted, data: None

    def whole(self, name: str, check: object = None) -> bytes:
        raise AssertionError(f"{name} was read whole")

    def size(self, name: str) -> int:
        raise AssertionError(f"the size of {name} was asked for")

    def read(self, wanted: Sequence[Range]) -> list[memoryview]:
        self.reads.append(list(wanted))
        found = [bytearray(self._bytes(one)) for one in wanted]
        for one, data in zip(wanted, found, strict=True):
            self.damage(one, data)
        return [memoryview(data) for data in found]

    def read_again(self, wanted: Range) -> memoryview:
        self.again.append(wanted)
        return memoryview(self._bytes(wanted))

    def close(self) -> None:
        pass

    def _bytes(self, wanted: Range) -> bytes:
        data = self.files[wanted.name][wanted.start : wanted.start + wanted.length]
        assert len(data) == wanted.length, wanted
        return data


def remote(folder: Path) -> tuple[TokenSource, Memory]:
    files = Memory(folder)
    return TokenSource(files.where, index=(folder / "manifest.json").read_bytes(), files=files), files


def rows(source: TokenSource, begins: np.ndarray, length: int) -> np.ndarray:
    out = np.full((len(begins), length), 77, dtype=source.dtype)
    source.read_rows(begins, out)
    return out


# ---- rows and documents --------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
def test_any_rows_read_what_was_written(written: tuple[Path, np.ndarray], proof) -> None:
    folder, tokens = written
    sources = [TokenSource(folder), remote(folder)[0]]
    size = PAYLOAD_BYTES // sources[0].dtype.itemsize
    rng = np.random.default_rng(2)
    edges = [0, 1, size - 1, size, size + 1, 44_999, 45_000, 45_001, 45_000 + size, 90_000, 100_000, 100_001]
    for case in range(proof(150, 10_000)):
        length = int(rng.choice([1, 2, size - 1, size, size + 1, 4_097, 33_000, 60_000, rng.integers(1, 100_001)]))
        begins = rng.integers(0, N_TOKENS - length + 1, rng.integers(1, 40))
        near = [edge for edge in edges if edge + length <= N_TOKENS]
        begins[rng.random(len(begins)) < 0.3] = rng.choice(near)
        expected = np.stack([tokens[begin : begin + length] for begin in begins])
        assert np.array_equal(rows(sources[case % 2], begins, length), expected), (begins, length)


def test_read_gives_int64_of_any_range(written: tuple[Path, np.ndarray]) -> None:
    folder, tokens = written
    source = TokenSource(folder)
    for begin, n in ((0, 0), (0, N_TOKENS), (44_998, 5), (100_001, 0)):
        got = source.read(begin, n)
        assert got.dtype == np.int64
        assert np.array_equal(got, tokens[begin : begin + n])


def test_no_rows_are_no_rows(written: tuple[Path, np.ndarray]) -> None:
    source, files = remote(written[0])
    source.read_rows(np.zeros(0, np.int64), np.empty((0, 5), source.dtype))
    source.read_rows(np.zeros(3, np.int64), np.empty((3, 0), source.dtype))
    assert source.documents_at(np.zeros(0, np.int64)).size == 0
    assert files.reads == []


def test_reading_outside_is_an_error(written: tuple[Path, np.ndarray]) -> None:
    source = TokenSource(written[0])
    for begin, n in ((-1, 2), (100_001, 1), (0, 100_002)):
        with pytest.raises(DataError, match="allowed: 0 to 100,001"):
            source.read(begin, n)
    with pytest.raises(DataError, match="allowed: 0 to 100,001"):
        rows(source, np.array([5, 99_999, 7]), 3)
    with pytest.raises(DataError, match="allowed: 0 to 100,001"):
        source.documents_at(np.array([100_001]))
    for document in (-1, source.n_documents):
        with pytest.raises(UserError, match="allowed: 0 to "):
            source.document_span(document)


def test_documents_are_found_from_the_blocks(written: tuple[Path, np.ndarray], proof) -> None:
    folder, tokens = written
    source = TokenSource(folder)
    ends = np.flatnonzero(tokens == source.eod_id)
    assert source.n_documents == len(ends)
    spans = [source.document_span(document) for document in range(len(ends))]
    assert spans == list(zip([0, *(ends[:-1] + 1)], ends + 1, strict=True))
    at = np.random.default_rng(3).integers(0, N_TOKENS, proof(2_000, 200_000))
    at = np.concatenate([at, ends, ends[:-1] + 1])
    assert np.array_equal(source.documents_at(at), np.searchsorted(ends, at))


def test_documents_of_a_store_are_found_in_few_rounds(written: tuple[Path, np.ndarray]) -> None:
    source, files = remote(written[0])
    source.document_span(100)
    assert len(files.reads) <= 8
    assert {one.length for call in files.reads for one in call} == {BLOCK_BYTES}


# ---- what is asked for ---------------------------------------------------------------------------------------------


def test_a_row_of_a_store_is_one_range_and_nothing_else(written: tuple[Path, np.ndarray]) -> None:
    source, files = remote(written[0])
    size = PAYLOAD_BYTES // source.dtype.itemsize
    rows(source, np.array([0, size - 1, 45_000 + size]), size)
    assert files.reads == [
        [
            Range(file_name(0), block_start(0), BLOCK_BYTES),
            Range(file_name(0), block_start(0), 2 * BLOCK_BYTES),
            Range(file_name(1), block_start(1), BLOCK_BYTES),
        ]
    ]
    assert files.again == []


def test_nothing_is_opened_before_the_first_read(written: tuple[Path, np.ndarray], tmp_path: Path) -> None:
    folder, tokens = written
    source = TokenSource(tmp_path / "later", index=(folder / "manifest.json").read_bytes())
    with pytest.raises(DataError, match=r"tokens-00001\.tok does not exist"):
        source.read(45_000, 5)
    shutil.copytree(folder, tmp_path / "later")
    (tmp_path / "later" / "manifest.json").unlink()
    assert np.array_equal(source.read(45_000, 5), tokens[45_000:45_005])
    source.close()
    assert np.array_equal(source.read(45_000, 5), tokens[45_000:45_005])


def test_few_files_stay_open_and_threads_share_them(
    written: tuple[Path, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smalti.data.fetch.descriptors._MIN_OPEN", 1)
    monkeypatch.setattr("resource.getrlimit", lambda which: (4, 4))
    folder, tokens = written
    source = TokenSource(folder)
    begins = np.random.default_rng(4).integers(0, 99_000, (300, 4))
    with ThreadPoolExecutor(8) as pool:
        for begin, got in zip(begins, pool.map(lambda b: rows(source, b, 1000), begins), strict=True):
            assert np.array_equal(got, np.stack([tokens[b : b + 1000] for b in begin]))
    assert len(source._blocks._local.opened.by_key) == 1


# ---- damage --------------------------------------------------------------------------------------------------------


def places(manifest: Manifest, file: int) -> Iterator[tuple[str, range]]:
    """Every kind of byte in a file, by name."""
    blocks = (file_bytes(manifest.tokens_of_file(file), manifest.token_bytes) - HEADER_BYTES) // BLOCK_BYTES
    last = block_start(blocks - 1)
    used = manifest.tokens_of_file(file) * manifest.token_bytes - (blocks - 1) * PAYLOAD_BYTES
    yield "header", range(64, HEADER_BYTES - 8)
    yield "fields of the header", range(64)
    yield "checksum of the header", range(HEADER_BYTES - 8, HEADER_BYTES)
    yield "tokens", range(HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES)
    yield "count of documents", range(HEADER_BYTES + PAYLOAD_BYTES, HEADER_BYTES + PAYLOAD_BYTES + 8)
    yield "checksum of a block", range(HEADER_BYTES + PAYLOAD_BYTES + 8, HEADER_BYTES + BLOCK_BYTES)
    yield "tokens of the last block", range(last, last + used)
    yield "zeros after the last token", range(last + used, last + PAYLOAD_BYTES)
    yield "end of the file", range(last + PAYLOAD_BYTES, last + BLOCK_BYTES)
    yield "anywhere", range(last + BLOCK_BYTES)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[at] ^= 1 << bit
    return bytes(damaged)


@pytest.mark.sample(1)
def test_every_flipped_bit_of_a_file_is_found_and_named(copied: Path, proof, record) -> None:
    manifest = Manifest.load(copied)
    rng = np.random.default_rng(3)
    found = {}
    for kind, where in places(manifest, 1):
        found[kind] = proof(12, 2_000)
        for _ in range(found[kind]):
            path = copied / file_name(1)
            whole, at = path.read_bytes(), int(rng.choice(where))
            with path.open("r+b") as file:
                file.seek(at)
                file.write(flipped(whole, at, int(rng.integers(8)))[at : at + 1])
            block = (at - HEADER_BYTES) // BLOCK_BYTES
            with pytest.raises(DataError, match=rf"tokens-00001\.tok.*{f'block {block} ' if block >= 0 else ''}"):
                TokenSource(copied).read(0, N_TOKENS)
            path.write_bytes(whole)
    assert TokenSource(copied).read(0, N_TOKENS).size == N_TOKENS
    record(f"token_flips_{manifest.dtype}", {"found_of": found})


def test_a_flipped_bit_of_a_transfer_is_fetched_again(written: tuple[Path, np.ndarray], proof) -> None:
    folder, tokens = written
    source, files = remote(folder)
    rng = np.random.default_rng(5)
    damaged: list[Range] = []

    def damage(wanted: Range, data: bytearray) -> None:
        if rng.random() < 0.3:
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
            damaged.append(wanted)

    files.damage = damage
    for _ in range(proof(60, 5_000)):
        begins = rng.integers(0, N_TOKENS - 9_000, 6)
        assert np.array_equal(rows(source, begins, 9_000), np.stack([tokens[b : b + 9_000] for b in begins]))
    assert len(damaged) > 50
    assert sorted(files.again) == sorted(damaged)
    assert source.n_reread == len(damaged)


def test_a_block_that_is_bad_everywhere_is_named(copied: Path) -> None:
    path = copied / file_name(1)
    path.write_bytes(flipped(path.read_bytes(), block_start(2) + 17, 3))
    size = PAYLOAD_BYTES // Manifest.load(copied).token_bytes
    memory = fsspec.filesystem("memory")
    for each in copied.iterdir():
        memory.pipe_file(f"/bad/{each.name}", each.read_bytes())
    for source in (TokenSource(copied), TokenSource("memory://bad"), remote(copied)[0]):
        with pytest.raises(DataError) as caught:
            source.read(FILE_TOKENS + size, size + 1)
        message = r"tokens-00001.tok is corrupt: block 2 (bytes 20,480 to 28,672) does not match its checksum"
        assert message in str(caught.value)
        assert "hint: copy the file again" in str(caught.value)
        source.read(FILE_TOKENS, 2 * size)
        source.read(FILE_TOKENS + 3 * size, 100)


def test_two_copies_with_different_bad_blocks_make_a_good_one(written: tuple[Path, np.ndarray]) -> None:
    folder, tokens = written
    source, files = remote(folder)
    size = PAYLOAD_BYTES // source.dtype.itemsize
    first = files.files[file_name(0)]
    copies = [flipped(first, block_start(1), 1), flipped(first, block_start(0), 1)]
    files.files[file_name(0)] = flipped(copies[0], block_start(0), 1)

    def again(wanted: Range) -> memoryview:
        files.again.append(wanted)
        return memoryview(copies[len(files.again) - 1][wanted.start : wanted.start + wanted.length])

    files.read_again = again
    assert np.array_equal(source.read(5, 2 * size - 5), tokens[5 : 2 * size])
    assert len(files.again) == 2


@pytest.mark.parametrize("fault", ["block", "header", "cut", "long", "missing"])
def test_what_a_local_folder_has_lost_comes_from_its_mirror(
    copied: Path, written: tuple[Path, np.ndarray], tmp_path: Path, fault: str
) -> None:
    folder, tokens = written
    path = copied / file_name(1)
    whole = path.read_bytes()
    if fault == "missing":
        path.unlink()
    else:
        changed = {
            "block": flipped(whole, block_start(0) + 3, 0),
            "header": flipped(whole, 3000, 0),
            "cut": whole[:-5000],
            "long": whole + b"x",
        }
        path.write_bytes(changed[fault])
    with pytest.raises(DataError, match=r"tokens-00001\.tok"):
        TokenSource(copied).read(0, N_TOKENS)
    source = TokenSource(copied, files=open_files(str(copied), mirrors=[str(folder)]))
    assert np.array_equal(source.read(0, N_TOKENS), tokens)
    assert source.n_reread == (fault == "block")


def test_damage_after_opening_is_noticed_on_the_next_read(copied: Path) -> None:
    source = TokenSource(copied)
    source.read(0, 10)
    path = copied / file_name(0)
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 3)
        file.write(bytes([whole[HEADER_BYTES + 3] ^ 1]))
    with pytest.raises(DataError, match="block 0"):
        source.read(0, 10)
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 100)
    with pytest.raises(DataError, match="truncated"):
        source.read(0, 10)


def test_a_block_of_another_place_or_data_set_is_found(copied: Path, tmp_path: Path) -> None:
    manifest = Manifest.load(copied)
    write(tmp_path / "other", vocab_size=manifest.vocab_size, eod_id=manifest.eod_id, salt="1" + "0" * 15)
    files = {number: (copied / file_name(number)).read_bytes() for number in (0, 1)}
    stale = (tmp_path / "other" / file_name(0)).read_bytes()

    def block(data: bytes, number: int) -> bytes:
        return data[block_start(number) : block_start(number + 1)]

    for foreign in (block(files[0], 1), block(files[1], 2), block(stale, 2), bytes(BLOCK_BYTES)):
        path = copied / file_name(0)
        path.write_bytes(files[0][: block_start(2)] + foreign + files[0][block_start(3) :])
        with pytest.raises(DataError, match=r"tokens-00000\.tok is corrupt: block 2"):
            TokenSource(copied).read(0, N_TOKENS)
    path.write_bytes(stale)
    with pytest.raises(DataError, match=r"is not the file that the manifest lists: its salt is"):
        TokenSource(copied).read(0, 5)


def test_every_block_has_the_count_of_documents(written: tuple[Path, np.ndarray]) -> None:
    folder, tokens = written
    manifest = Manifest.load(folder)
    size = PAYLOAD_BYTES // manifest.token_bytes
    for file in range(manifest.n_files):
        data = (folder / file_name(file)).read_bytes()
        for number in range((len(data) - HEADER_BYTES) // BLOCK_BYTES):
            (before,) = struct.unpack_from("<Q", data, block_start(number) + PAYLOAD_BYTES)
            assert before == (tokens[: file * FILE_TOKENS + number * size] == manifest.eod_id).sum()


def test_small_sources_are_one_block(tmp_path: Path) -> None:
    manifest = write_source(tmp_path / "s", 3)
    assert (tmp_path / "s" / file_name(0)).stat().st_size == HEADER_BYTES + BLOCK_BYTES
    source = TokenSource(tmp_path / "s")
    assert source.document_span(2)[1] == manifest.n_tokens


def test_a_token_source_implements_the_protocol(written: tuple[Path, np.ndarray]) -> None:
    from smalti.data.sources.source import Source

    source: Source = TokenSource(written[0])
    files: Files = Memory(written[0])
    manifest = Manifest.load(written[0])
    assert files.where
    assert (source.where, source.n_tokens, source.digest) == (str(written[0]), N_TOKENS, manifest.digest)
    assert source.dtype == np.dtype("<u2" if manifest.dtype == "u16" else "<u4")
    assert source.checked == "every block (XXH3-64)"
    assert (source.tokenizer_digest, source.vocab_size, source.eod_id, source.n_documents) == (
        TOKENIZER,
        manifest.vocab_size,
        manifest.eod_id,
        manifest.n_documents,
    )
