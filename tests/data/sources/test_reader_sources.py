"""``format: auto``, plain files and text: formats are detected, and ambiguous ones are errors."""

import gzip
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zstandard
from random_tokens import write_source
from s3_server import Objects, object_server, s3_environment
from test_reader_forms import CASES, FIXTURES, config_of, opened

from smalti.base.errors import DataError, UserError
from smalti.config.data import FetchConfig, SourceConfig
from smalti.data.fetch import open_files
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.readers import megatron, text
from smalti.data.sources.readers.file_names import map_files
from smalti.data.tokenizer.encode import Tokenizer, load_tokenizer
from smalti.data.tokenizer.train import train_bpe

IDS = np.arange(1000, dtype=np.uint16)


def everything(path: Path, **options: object) -> list[int]:
    source = opened(SourceConfig(path=str(path), **options))
    return source.read(0, source.n_tokens).tolist()


def test_our_own_form(tmp_path: Path) -> None:
    manifest = write_source(tmp_path / "ours", 10)
    source = opened(SourceConfig(path=str(tmp_path / "ours")))
    assert source.digest == manifest.digest
    with pytest.raises(UserError, match="eod_id has no effect with format=smalti"):
        opened(SourceConfig(path=str(tmp_path / "ours"), eod_id=3))


def test_npy_files_of_any_shape_and_byte_order(tmp_path: Path) -> None:
    for name, array in {
        "flat": IDS,
        "rows": IDS.reshape(10, 100),
        "wide": IDS.astype("<i8"),
        "turned": IDS.astype(">u4"),
        "column": np.asfortranarray(IDS.reshape(-1, 1)),
    }.items():
        np.save(tmp_path / f"{name}.npy", array)
        assert everything(tmp_path / f"{name}.npy") == IDS.tolist(), name
    np.save(tmp_path / "by_column.npy", np.asfortranarray(IDS.reshape(10, 100)))
    np.save(tmp_path / "floats.npy", IDS.astype(float))
    np.save(tmp_path / "cube.npy", IDS.reshape(10, 10, 10))
    for name, told in (("by_column", "Fortran order"), ("floats", "float64"), ("cube", "one dimension, or two")):
        with pytest.raises(DataError, match=told):
            everything(tmp_path / f"{name}.npy")
    with pytest.raises(UserError, match="dtype=int32, but"):
        everything(tmp_path / "flat.npy", dtype="int32")
    np.save(tmp_path / "negative.npy", np.array([3, -1, 4]))
    with pytest.raises(DataError, match="holds the token id -1"):
        everything(tmp_path / "negative.npy")


def test_numbers_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(IDS[:300].tobytes())
    (tmp_path / "b.bin").write_bytes(IDS[300:].tobytes())
    (tmp_path / "olmo.npy").write_bytes(IDS.tobytes())
    (tmp_path / "notes.txt").write_text("not ours to read")
    assert everything(tmp_path / "olmo.npy", dtype="uint16") == IDS.tolist()
    assert everything(tmp_path, files=["*.bin"], dtype="uint16") == IDS.tolist()
    assert everything(tmp_path, files=["b.bin", "a.bin"], dtype="uint16") == [*IDS[300:], *IDS[:300]]
    with pytest.raises(UserError, match=r"the dtype of .*a\.bin is unknown(.|\n)*dtype=uint16"):
        everything(tmp_path / "a.bin")
    with pytest.raises(UserError, match="twice"):
        everything(tmp_path, files=["a.bin", "*.bin"], dtype="uint16")
    with pytest.raises(DataError, match=r"matches '\*\.tok'"):
        everything(tmp_path, files=["*.tok"], dtype="uint16")
    with pytest.raises(DataError, match="leads out of its folder"):
        everything(tmp_path, files=["../a.bin"], dtype="uint16")
    (tmp_path / "odd.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="not a whole number of uint64"):
        everything(tmp_path / "odd.bin", dtype="uint64")
    with pytest.raises(UserError, match="cannot be detected from its name"):
        everything(tmp_path / "notes.txt")
    assert everything(tmp_path / "a.bin", format="raw", dtype="uint16") == IDS[:300].tolist()


def test_ends_of_documents_beside_raw_files(tmp_path: Path) -> None:
    for name, part, ends in (("0.ds", IDS[:300], [100, 250, 300]), ("1.ds", IDS[300:], [1, 700])):
        (tmp_path / name).write_bytes(part.tobytes())
        (tmp_path / f"{name}.index").write_bytes(np.array(ends, "<u8").tobytes())
    source = opened(SourceConfig(path=str(tmp_path), dtype="uint16", document_ends=".index"))
    assert source.n_documents == 5
    assert [source.document_span(n) for n in range(5)] == [(0, 100), (100, 250), (250, 300), (300, 301), (301, 1000)]
    assert source.documents_at(np.array([0, 99, 100, 299, 300, 999])).tolist() == [0, 0, 1, 2, 3, 4]
    (tmp_path / "1.ds.index").write_bytes(np.array([1, 800], "<u8").tobytes())
    with pytest.raises(DataError, match="does not end with the 700 tokens"):
        opened(SourceConfig(path=str(tmp_path), dtype="uint16", document_ends=".index")).document_span(4)


def test_megatron_by_prefix_by_name_and_without_reading_a_large_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FIXTURES / "megatron-uint16"
    right = np.load(FIXTURES / "megatron-uint16.npz")["tokens"].tolist()
    for given in (path, f"{path}.idx", f"{path}.bin"):
        assert everything(Path(given)) == right
    assert everything(FIXTURES, format="megatron", files=["megatron-uint16"]) == right
    two = everything(FIXTURES, format="megatron", files=["megatron-uint16.bin"])
    assert two == right
    with pytest.raises(DataError, match="hold int32 and int64 and uint16"):
        everything(FIXTURES, format="megatron")
    monkeypatch.setattr(megatron, "_SMALL_BYTES", 100)
    large = opened(SourceConfig(path=str(path)))
    assert large.read(0, large.n_tokens).tolist() == right
    assert large.document_span(0)[0] == 0


def test_nothing_or_two_things_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="it does not exist"):
        everything(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no other format of tokens or documents"):
        everything(tmp_path)
    np.save(tmp_path / "x.npy", IDS)
    (tmp_path / "y.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"more than one format.*raw \(x\.npy\), text \(y\.jsonl\)(.|\n)*format="):
        everything(tmp_path)
    assert everything(tmp_path, format="raw") == IDS.tolist()
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match=r"neither of mds \(shards\) nor of litdata"):
        everything(tmp_path)
    train = tmp_path / "set" / "train"
    train.mkdir(parents=True)
    (train / "index.json").write_text("{}")
    (tmp_path / "set" / "heldout").mkdir()
    (tmp_path / "set" / "heldout" / "index.json").write_text("{}")
    with pytest.raises(DataError, match=f"hint: did you mean {train}"):
        everything(tmp_path / "set")
    shutil.rmtree(train)
    with pytest.raises(DataError, match="hint: check the path"):  # held-out documents are not offered for training
        everything(tmp_path / "set")
    with pytest.raises(ValueError, match="dtype has no effect with format=litdata; it is for mds, raw"):
        SourceConfig(path="x", format="litdata", dtype="int32")


@pytest.mark.parametrize("named", ["smalti", "mds", "litdata", "megatron", "raw"])
def test_a_wrong_form_names_the_format_of_the_folder(named: str, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", IDS)
    if named == "raw":
        (tmp_path / "a.npy").unlink()
        write_source(tmp_path, 10)
    with pytest.raises(DataError, match=r"hint: the folder has .*: format=.*, or omit format"):
        everything(tmp_path, format=named)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    inner = train_bpe(iter(["so kind, so small, so many words to say"] * 20), 300, pattern="cl100k")
    Tokenizer(inner, "<|endoftext|>").save(folder)
    return folder


def test_text_is_tokenised_when_it_is_opened(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    words = ["so kind", "so small", "", "many words"]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": word}) for word in words[:2]))
    pq.write_table(pa.table({"body": words[2:]}), tmp_path / "b.parquet")
    config, fetch, name = SourceConfig(path=str(tmp_path), column="body"), FetchConfig(), str(tokenizer)
    source = open_source(config, read_index(config, fetch, tokenizer=name), fetch, tokenizer=name)
    loaded = load_tokenizer(tokenizer)
    right = [id for word in words for id in (*loaded.encode(word), loaded.eod_id)]
    assert source.read(0, source.n_tokens).tolist() == right
    assert (source.n_documents, source.tokenizer_digest) == (4, loaded.digest)
    assert source.document_span(2)[1] - source.document_span(2)[0] == 1
    rows = np.empty((2, 3), source.dtype)
    source.read_rows(np.array([1, 0]), rows)
    assert rows.tolist() == [right[1:4], right[:3]]
    with pytest.raises(UserError, match=r"no tokenizer is given(.|\n)*data\.tokenizer=FOLDER"):
        read_index(config, fetch)
    index = read_index(config, fetch, tokenizer=name)
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "other"}))
    with pytest.raises(DataError, match=r"a\.jsonl was changed after it was opened"):
        open_source(config, index, fetch, tokenizer=name)
    monkeypatch.setattr(text, "LIMIT_BYTES", 10)
    with pytest.raises(UserError, match=r"would read and tokenise it at every start(.|\n)*smalti data tokenize"):
        read_index(config, fetch, tokenizer=name)


def test_text_that_is_damaged_a_bomb_or_in_a_mirror(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path, **fields: object) -> int:
        config, fetch, name = SourceConfig(path=str(path), **fields), FetchConfig(), str(tokenizer)
        index = read_index(config, fetch, tokenizer=name)
        return open_source(config, index, fetch, tokenizer=name).n_documents or 0

    line = json.dumps({"text": "so kind"}) + "\n"
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_text(line * 3)
    (tmp_path / "there" / "b.jsonl.gz").write_bytes(gzip.compress(line.encode() * 4))
    both = {"files": ("a.jsonl", "b.jsonl.gz"), "format": "text"}
    assert read(tmp_path / "here", mirrors=(str(tmp_path / "there"),), **both) == 7
    with pytest.raises(UserError, match=r"is a file(.|\n)*omit files"):
        read(tmp_path / "here" / "a.jsonl", files=("a.jsonl",))
    (tmp_path / "here" / "a.jsonl").write_text('{"body": "so kind"}')
    with pytest.raises(DataError, match=r"no field 'text'(.|\n)*column=") as told:
        read(tmp_path / "here" / "a.jsonl")
    assert "unreadable" not in str(told.value)
    monkeypatch.setattr(text, "LIMIT_BYTES", 1 << 16)
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name in ("bomb.jsonl.gz", "bomb.jsonl.zst", "bomb.parquet"):
        path, bomb = tmp_path / name, "x" * (1 << 20)
        if name.endswith("parquet"):
            pq.write_table(pa.table({"text": [bomb]}), path)
        elif name.endswith("gz"):
            path.write_bytes(gzip.compress(bomb.encode()))
        else:
            path.write_bytes(zstandard.compress(bomb.encode()))
        with pytest.raises(DataError, match="decompresses to more than 65,536 bytes"):
            read(path)
    snow = json.dumps({"text": "\N{SNOWMAN}" * 4000}, ensure_ascii=False).encode() + b"\n"
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl.gz").write_bytes(gzip.compress(snow * 2))
    monkeypatch.setattr(text, "LIMIT_BYTES", 26_000)
    assert read(tmp_path / "one.jsonl.gz") == 2
    with pytest.raises(UserError, match="would read and tokenise"):  # 16,000 characters of three bytes
        read(tmp_path, files=("one.jsonl.gz", "two.jsonl.gz"), format="text")


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Iterator[Objects]:
    objects = {
        f"bucket/{path.relative_to(FIXTURES).as_posix()}": path.read_bytes()
        for path in FIXTURES.rglob("*")
        if path.is_file() and path.suffix not in (".npz", ".py")
    }
    with object_server(objects) as running:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in s3_environment(running.url).items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.mark.parametrize("case", CASES)
def test_every_format_is_read_from_a_store(case: str, stored: Objects) -> None:
    near = opened(config_of(case))
    given = config_of(case).model_dump()
    options = {} if isinstance(given, str) else {name: given[name] for name in ("column", "dtype")}
    if case.startswith("megatron"):
        options["format"] = "megatron"
    far = opened(SourceConfig(path=f"s3://bucket/{case}", **options))
    assert far.read(0, far.n_tokens).tolist() == near.read(0, near.n_tokens).tolist()
    assert far.digest == near.digest
    far.close()
    assert stored.gets("index.json") == (not case.startswith("megatron"))
    assert stored.counts["LIST"] == 0


def test_files_of_a_store_are_requested_concurrently_and_returned_in_order(stored: Objects) -> None:
    names = [f"megatron-uint16.{kind}" for kind in ("bin", "idx")] * 8
    files, meet = open_files("s3://bucket"), threading.Barrier(len(names), timeout=60)

    def ask(name: str) -> int:
        meet.wait()
        return files.size(name)

    assert map_files(files, ask, names) == [(FIXTURES / name).stat().st_size for name in names]
    with pytest.raises(DataError, match="nobody-2"):
        map_files(files, files.size, [names[0], "nobody-2", "nobody-1"])
    files.close()


def test_a_store_is_never_listed(stored: Objects) -> None:
    with pytest.raises(DataError, match=r"neither manifest\.json nor index\.json; a store is not listed"):
        opened(SourceConfig(path="s3://bucket/nothing"))
    with pytest.raises(UserError, match=r"which is not listed(.|\n)*name its files"):
        opened(SourceConfig(path="s3://bucket/set", format="raw", dtype="uint16"))
    raw = SourceConfig(path="s3://bucket", format="raw", dtype="uint16", files=["megatron-uint16.bin"])
    assert opened(raw).read(0, 9).tolist() == np.load(FIXTURES / "megatron-uint16.npz")["tokens"][:9].tolist()
    assert opened(SourceConfig(path="s3://bucket/megatron-uint16.bin", dtype="uint16", format="raw")).n_tokens == 1528
    assert stored.counts["LIST"] == 0
