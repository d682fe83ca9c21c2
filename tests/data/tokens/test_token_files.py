import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from random_tokens import EOD, TOKENIZER, write_source

from smalti.base.errors import DataError, UserError
from smalti.base.hashing import sha256_file
from smalti.data.tokens import Manifest, TokenSource, TokenWriter
from smalti.data.tokens.format import HEADER_BYTES, Header, pack_header, unpack_header
from smalti.data.tokens.manifest import FORMAT, file_name, join_digests

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


def test_small_additions_equal_one_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = write_source(tmp_path / "one", 500, file_tokens=3_000)
    monkeypatch.setattr("smalti.data.tokens.writer._FLUSH_TOKENS", 100)
    many = write_source(tmp_path / "many", 500, file_tokens=3_000)
    assert one == many


def test_manifest_digests_are_those_of_the_files(written: tuple[Path, np.ndarray]) -> None:
    folder, _ = written
    manifest = Manifest.load(folder)
    assert manifest.digest == manifest.content_digest()
    for file, digest in enumerate(manifest.file_digests()):
        path = folder / file_name(file)
        assert digest == sha256_file(path)
        assert manifest.bytes_of_file(file) == path.stat().st_size
    TokenSource(folder).verify()


@pytest.mark.parametrize("keep", [0, 7, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1000, -1])
def test_truncated_file_is_refused(copied: Path, keep: int) -> None:
    path = copied / "tokens-00002.tok"
    size = path.stat().st_size
    os.truncate(path, keep if keep >= 0 else size + keep)
    source = TokenSource(copied)
    for look in (source.check_files, source.verify, lambda: source.read(95_000, 10)):
        with pytest.raises(DataError, match=rf"tokens-00002\.tok is truncated: .* {size:,} expected"):
            look()


def test_missing_long_and_foreign_files_are_refused(copied: Path, tmp_path: Path) -> None:
    first, second = copied / "tokens-00000.tok", copied / "tokens-00001.tok"
    kept = first.read_bytes()
    first.write_bytes(kept + b"x")
    with pytest.raises(DataError, match=r"tokens-00000\.tok is too long"):
        TokenSource(copied).check_files()
    shutil.copy(second, first)
    with pytest.raises(DataError, match=r"tokens-00000\.tok is not the file that the manifest lists: its file is 1"):
        TokenSource(copied).read(0, 5)
    first.unlink()
    with pytest.raises(DataError, match=r"tokens-00000\.tok does not exist"):
        TokenSource(copied).check_files()
    first.write_bytes(kept)
    TokenSource(copied).check_files()


def test_manifest_that_was_changed_is_refused(copied: Path) -> None:
    path = copied / "manifest.json"
    whole = json.loads(path.read_text())
    for key, value, message in (
        ("eod_id", 5, "digest does not match"),
        ("format", 1, "format 1"),
        ("more", 1, "not a manifest"),
        ("salt", "x" * 16, "is inconsistent"),
        ("salt", "-" + "1" * 15, "is inconsistent"),
        ("n_tokens", whole["n_tokens"] + 45_000, "is inconsistent"),
        ("n_tokens", str(whole["n_tokens"]), "n_tokens is missing, unknown or of a wrong type"),
        ("n_tokens", True, "wrong type"),
        ("sha256", "?" + whole["sha256"][1:], "is inconsistent"),
        ("file_tokens", 0, "is inconsistent"),
        ("eod_id", VOCAB, "is inconsistent"),
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
    with pytest.raises(DataError, match=r"manifest\.json does not exist"):
        TokenSource(tmp_path / "s")


def test_a_second_writer_is_refused_while_the_first_is_at_work(tmp_path: Path) -> None:
    options = {"vocab_size": 10, "eod_id": 0, "tokenizer_digest": TOKENIZER}
    with TokenWriter(tmp_path / "s", **options) as writer:
        writer.add([1])
        with pytest.raises(UserError, match="another process is writing"):
            TokenWriter(tmp_path / "s", **options)
    TokenSource(tmp_path / "s").verify()


@pytest.mark.sample(1)
@pytest.mark.parametrize("room_bytes", [100_000, 3_000_000])
def test_a_full_disk_leaves_no_data_set(tmp_path: Path, room_bytes: int) -> None:
    """No file may grow beyond ``room_bytes``, which stands for a disk that is full there."""
    program = (
        "import resource, signal, sys, numpy as np\n"
        "from smalti.data.tokens import TokenWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "with TokenWriter(sys.argv[1], vocab_size=512, eod_id=0, tokenizer_digest='ab' * 32) as writer:\n"
        "    for _ in range(20): writer.add(np.ones(200_000, dtype=np.int64))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "s"), str(room_bytes)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert child.stderr.rstrip().endswith("OSError: [Errno 27] File too large"), child.stderr
    assert os.listdir(tmp_path / "s") == []


@pytest.mark.proof
def test_the_manifest_of_twelve_trillion_tokens_has_less_than_3_mb(tmp_path: Path, record) -> None:
    n_tokens, file_tokens = 12 * 10**12, 1 << 28
    digests = [os.urandom(32).hex() for _ in range(-(-n_tokens // file_tokens))]
    manifest = Manifest(
        format=FORMAT,
        dtype="u32",
        n_tokens=n_tokens,
        n_documents=12 * 10**9,
        n_text_bytes=50 * 10**12,
        eod_id=0,
        vocab_size=128_000,
        tokenizer_digest=TOKENIZER,
        salt="f" * 16,
        file_tokens=file_tokens,
        sha256=join_digests(digests),
        ids_sha256="cd" * 32,
    ).with_digest()
    manifest.save(tmp_path)
    size = (tmp_path / "manifest.json").stat().st_size
    assert size <= 3_000_000
    assert Manifest.load(tmp_path) == manifest
    assert manifest.file_digests() == digests
    assert sum(map(manifest.tokens_of_file, range(manifest.n_files))) == n_tokens
    record("token_manifest", {"tokens": n_tokens, "files": manifest.n_files, "manifest_bytes": size})


@pytest.mark.slow
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
    with pytest.raises(DataError, match=r"manifest\.json does not exist"):
        TokenSource(tmp_path / "s")
    (tmp_path / "s" / "ids.parquet").write_bytes(b"of another writing")
    (tmp_path / "s" / "tokens-00009.tok").write_bytes(b"of a longer writing")
    write_source(tmp_path / "s", 20)
    TokenSource(tmp_path / "s").verify()
    assert {"manifest.json", "tokens-00000.tok"} <= {*os.listdir(tmp_path / "s")}
    assert [name for name in os.listdir(tmp_path / "s") if "tmp" in name or "ids" in name or "00009" in name] == []


def test_header_round_trip_and_versions() -> None:
    header = Header(2, 123, 5, TOKENIZER, 1 << 63, 7)
    data = pack_header(header)
    assert len(data) == HEADER_BYTES
    assert unpack_header(data, "f") == header
    with pytest.raises(DataError, match="not a token file"):
        unpack_header(b"PAR1" + data[4:], "f")
