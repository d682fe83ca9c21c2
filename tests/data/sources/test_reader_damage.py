"""Damage in other people's files: an error that names what is bad, or right data; never anything else."""

import gzip
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_reader_forms import CASES, FIXTURES, config_of, opened

from smalti.base.errors import DataError, UserError
from smalti.config.data import SourceConfig

pytestmark = pytest.mark.slow


def copied(case: str, folder: Path) -> Path:
    """A copy of a fixture that may be damaged."""
    for path in FIXTURES.glob(f"{case}*"):
        if path.is_dir():
            shutil.copytree(path, folder / path.name)
        elif path.suffix != ".npz":
            shutil.copy(path, folder / path.name)
    return folder


def files_of(case: str, folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.proof
@settings(max_examples=max(200, settings().max_examples))
@given(data=st.data())
def test_damage_gives_an_error_of_ours_or_the_right_data(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    case = data.draw(st.sampled_from(CASES))
    folder = copied(case, tmp_path_factory.mktemp("damage"))
    path = data.draw(st.sampled_from(files_of(case, folder)), "file")
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans(), "cut"):
        del content[data.draw(st.integers(0, len(content) - 1), "length") :]
    else:
        head = st.integers(0, min(len(content) - 1, 64))
        place = data.draw(st.one_of(head, st.integers(0, len(content) - 1)), "byte")
        content[place] ^= 1 << data.draw(st.integers(0, 7), "bit")
    path.write_bytes(content)
    tracemalloc.start()
    try:
        found, checked = read_all(case, folder), opened(config_of(case, folder)).checked
    except UserError as error:  # DataError is one; an encoding that was changed is the user's to tell
        told = str(error)
        found, checked = None, ""
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    shutil.rmtree(folder)
    assert peak < 64 << 20
    if found is None:
        assert str(folder) in told or "dtype" in told or "column" in told
    elif checked.startswith("whole") and path.suffix != ".json":  # else nothing in the form shows it, and this is said
        assert np.array_equal(found, read_all(case, FIXTURES))


def read_all(case: str, folder: Path) -> np.ndarray:
    """All that can be read and checked."""
    source = opened(config_of(case, folder))
    source.verify()
    if source.n_documents is not None:
        source.documents_at(np.arange(source.n_tokens))
    return source.read(0, source.n_tokens)


def _edit(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = next(folder.rglob("index.json"))
        value = json.loads(path.read_bytes())
        change(value)
        path.write_text(json.dumps(value))

    return edit


def _set(shard: int, *keys: str, to: object) -> Callable[[Path], None]:
    def change(value: dict) -> None:
        entry = value["shards"][shard]
        for key in keys[:-1]:
            entry = entry[key]
        entry[keys[-1]] = to

    return _edit(change)


@pytest.mark.parametrize(
    ("case", "damage", "told"),
    [
        ("mds-alike-int32", _set(1, "raw_data", "basename", to="../x.mds"), r"shard 1: the file name '\.\./x\.mds'"),
        ("mds-alike-int32", _set(1, "raw_data", "basename", to="/etc/passwd"), "leads out of its folder"),
        ("mds-alike-int32", _set(0, "version", to=3), "shard 0: its format is 'mds', version 3"),
        ("mds-alike-int32", _set(0, "format", to="json"), "its format is 'json'"),
        ("mds-alike-int32", _set(2, "samples", to=10**9), "shard 2: .* too few for 1,000,000,000 samples"),
        ("mds-alike-int32", _set(2, "samples", to=True), "samples is True"),
        ("mds-alike-int32", _set(0, "compression", to="lzma"), "compression 'lzma' is not known"),
        ("mds-alike-int32", _set(0, "raw_data", "hashes", "crc", to="1"), "the hash 'crc' cannot be checked"),
        ("mds-alike-int32", _set(0, "column_encodings", to=["pkl"]), "other columns than the shards before"),
        ("mds-fixed-int32-zstd", _set(0, "raw_data", "bytes", to=1500), "decompress|do not make"),
        ("mds-fixed-int32-zstd", _set(0, "zip_data", "hashes", "sha1", to="ab"), r"zstd has the sha1 .*says ab"),
        ("mds-fixed-int32-zstd", _set(0, "raw_data", "hashes", "xxh64", to="ab"), "decompressed data has the xxh64"),
        ("mds-fixed-int32-zstd", _set(0, "zip_data", to=None), "shard 0"),
        (
            "mds-fixed-int32-zstd",
            _set(0, "samples", to=10),
            r"shard\.00000\.mds.* does not begin as its index says \(10",
        ),
        ("mds-fixed-int32-zstd", _set(1, "samples", to=8), r"shard\.00001\.mds.* does not begin as its index says"),
        ("mds-fixed-int32-zstd", _set(2, "samples", to=0), r"shard\.00002\.mds.* does not begin as its index says"),
        (
            "mds-fixed-int32-zstd",
            _edit(lambda value: [one.update(samples=one["samples"] - 1) for one in value["shards"]]),
            "does not begin as its index says",
        ),
        ("mds-columns-fixed-snappy", _set(1, "column_sizes", to=[8, 32, 7]), "is ndarray:uint8:7, of 8 bytes"),
        ("mds-varied-int64", _edit(lambda value: value.update(version=1)), r"not the index of an MDS data set"),
        ("mds-varied-int64", _edit(lambda value: value.update(shards=[])), "lists no shards"),
    ],
)
def test_a_wrong_mds_index(case: str, damage: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    damage(copied(case, tmp_path))
    with pytest.raises(DataError, match=told):
        opened(config_of(case, tmp_path)).verify()


@pytest.mark.parametrize(
    "second",
    [bytes([33, 4, 2]) + np.array([7, 8], "<i4").tobytes(), bytes([17, 8, 2, 1]) + np.array([7, 8], "<i2").tobytes()],
    ids=["dtype", "dimensions"],
)
def test_arrays_that_mix_dtypes_or_dimensions_are_not_called_damage_alone(second: bytes, tmp_path: Path) -> None:
    parts = [bytes([17, 4, 3]) + np.array([1, 2, 3], "<i2").tobytes(), second]
    samples = [len(part).to_bytes(4, "little") + part for part in parts]
    offsets = np.cumsum([4 * (len(samples) + 2), *map(len, samples)])
    data = np.array([len(samples), *offsets], "<u4").tobytes() + b"".join(samples)
    (tmp_path / "shard.00000.mds").write_bytes(data)
    entry = {
        "column_encodings": ["ndarray"], "column_names": ["tokens"], "column_sizes": [None], "compression": None,
        "format": "mds", "version": 2, "samples": len(samples), "zip_data": None,
        "raw_data": {"basename": "shard.00000.mds", "bytes": len(data), "hashes": {}},
    }  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))
    with pytest.raises(DataError, match="write the column again with one") as told:
        read_folder(tmp_path)
    assert not (told.value.hint or "").startswith("the shard is damaged")


def read_folder(folder: Path) -> np.ndarray:
    source = opened(SourceConfig(path=str(folder)))
    return source.read(0, source.n_tokens)


def test_pickles_are_refused(tmp_path: Path) -> None:
    def pickled(value: dict) -> None:
        for entry in value["shards"]:
            entry["column_encodings"] = ["pkl"]

    _edit(pickled)(copied("mds-alike-int32", tmp_path))
    for options in ({"column": "tokens"}, {}):
        with pytest.raises(UserError, match=r"is pickled \(pkl\)|no columns that can hold tokens: tokens \(pkl\)"):
            opened(config_of("mds-alike-int32", tmp_path, **options))
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match=r"x\.npy"):
        opened(SourceConfig(path=str(tmp_path / "x.npy")))


def test_a_flipped_bit_in_a_packed_shard_is_named(tmp_path: Path) -> None:
    folder = copied("mds-columns-fixed-snappy", tmp_path)
    _flip(folder / "mds-columns-fixed-snappy" / "shard.00001.mds.snappy", -3)
    source = opened(config_of("mds-columns-fixed-snappy", tmp_path))
    with pytest.raises(DataError, match=r"shard\.00001\.mds\.snappy has the sha3_256"):
        source.read(0, source.n_tokens)


def test_shards_that_are_only_there_decompressed_are_read(tmp_path: Path) -> None:
    folder = copied("mds-varied-any-gz", tmp_path) / "mds-varied-any-gz"
    compressed = opened(SourceConfig(path=str(folder)))
    whole = compressed.read(0, compressed.n_tokens)
    for path in folder.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = opened(SourceConfig(path=str(folder)))
    assert np.array_equal(plain.read(0, plain.n_tokens), whole)
    assert plain.digest == compressed.digest
    plain.verify()
    _flip(min(folder.glob("shard.*")), -1)
    with pytest.raises(DataError, match="its index says"):
        opened(SourceConfig(path=str(folder))).verify()


def test_a_flipped_bit_in_a_plain_shard_is_found_by_verify(tmp_path: Path) -> None:
    folder = copied("mds-alike-int32", tmp_path)
    _flip(folder / "mds-alike-int32" / "shard.00001.mds", -3)
    source = opened(config_of("mds-alike-int32", tmp_path))
    with pytest.raises(DataError, match=r"shard\.00001\.mds has the md5"):
        source.verify()


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    import zstandard

    folder = copied("mds-fixed-int32-zstd", tmp_path) / "mds-fixed-int32-zstd"
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    (folder / "shard.00000.mds.zstd").write_bytes(bomb)

    def shrink(value: dict) -> None:
        value["shards"][0]["zip_data"] = {"basename": "shard.00000.mds.zstd", "bytes": len(bomb), "hashes": {}}

    _edit(shrink)(tmp_path)
    tracemalloc.start()
    with pytest.raises(DataError, match="decompresses to more than"):
        opened(config_of("mds-fixed-int32-zstd", tmp_path)).read(0, 10)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("place", "value", "told"),
    [
        (0, b"X", "is not an index of Megatron's"),
        (9, b"\2", "has version 2"),
        (17, b"\7", "is for float32"),
        (17, b"\x63", "is for numbers of kind 99"),
        (18, b"\xff" * 7, "its header requires"),
        (34, b"\xff\xff\xff\xff", "are not contiguous"),
    ],
)
def test_a_wrong_megatron_index(place: int, value: bytes, told: str, tmp_path: Path) -> None:
    copied("megatron-int32", tmp_path)
    path = tmp_path / "megatron-int32.idx"
    content = bytearray(path.read_bytes())
    content[place : place + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(DataError, match=told):
        opened(config_of("megatron-int32", tmp_path))


def test_modes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    copied("megatron-int64-modes", tmp_path)
    path = tmp_path / "megatron-int64-modes.idx"
    content = bytearray(path.read_bytes())
    content[-2] = 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"not text \(mode 1\)"):
        opened(config_of("megatron-int64-modes", tmp_path))


def _flip(path: Path, place: int) -> None:
    """Flip one bit of the byte at ``place``."""
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
