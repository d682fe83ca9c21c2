"""Tokens written as MDS are the same tokens; StreamingDataset itself reads them in test_readers_proof.py."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from random_tokens import write_source

from smalti.base.errors import DataError, UserError
from smalti.cli.main import run as smalti
from smalti.config.data import FetchConfig, SourceConfig
from smalti.data.sources import mds_writer
from smalti.data.sources.mds_writer import MdsOptions, plan_mds, write_mds
from smalti.data.sources.open import open_source, read_index
from smalti.data.sources.source import Source


def opened(path: Path, **options: object) -> Source:
    config, fetch = SourceConfig(path=str(path), **options), FetchConfig()
    return open_source(config, read_index(config, fetch), fetch)


@pytest.fixture
def tokens(tmp_path: Path) -> Source:
    write_source(tmp_path / "ours", 60, vocab_size=500)
    return opened(tmp_path / "ours")


@pytest.mark.parametrize("compression", [None, "zstd:5"])
@pytest.mark.parametrize("seq_len", [None, 33])
def test_what_was_written_is_read_back(
    tokens: Source, tmp_path: Path, seq_len: int | None, compression: str | None
) -> None:
    options = MdsOptions(seq_len, compression=compression, hashes=("sha1", "xxh3_64"), shard_bytes=1500)
    report = write_mds(tokens, str(tmp_path / "mds"), options)
    back = opened(tmp_path / "mds")
    assert report.shards > 2
    assert report.dtype == "uint16"
    assert report.n_bytes == sum(path.stat().st_size for path in (tmp_path / "mds").glob("shard.*"))
    assert back.n_tokens == report.tokens == tokens.n_tokens - report.left_out_tokens
    assert np.array_equal(back.read(0, back.n_tokens), tokens.read(0, back.n_tokens))
    back.verify()
    if seq_len is None:
        assert back.n_documents == tokens.n_documents == report.samples
        assert [back.document_span(n) for n in range(60)] == [tokens.document_span(n) for n in range(60)]
        assert report.left_out_tokens == 0
    else:
        assert 0 <= report.left_out_tokens < 33


def test_other_forms_and_dtypes_can_be_written_too(tokens: Source, tmp_path: Path) -> None:
    write_mds(tokens, str(tmp_path / "one"), MdsOptions(20, dtype="int64", hashes=()))
    one = opened(tmp_path / "one", eod_id=0, vocab_size=500)
    write_mds(one, str(tmp_path / "two"), MdsOptions(None, dtype="uint32"))
    two = opened(tmp_path / "two")
    assert np.array_equal(one.read(0, one.n_tokens), two.read(0, two.n_tokens))
    assert np.array_equal(one.read(0, one.n_tokens), tokens.read(0, one.n_tokens))


def test_documents_that_a_source_knows_are_kept_without_a_token_that_closes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mds_writer, "_READ_TOKENS", 7)
    ends = np.cumsum([4, 0, 9, 1, 30])
    np.arange(44, dtype="<u2").tofile(tmp_path / "a.bin")
    ends.astype("<u8").tofile(tmp_path / "a.bin.index")
    for given in ({}, {"eod_id": 2}):
        source = opened(tmp_path / "a.bin", dtype="uint16", document_ends=".index", **given)
        target = tmp_path / f"mds{len(given)}"
        assert plan_mds(source, MdsOptions()).samples == 5
        assert write_mds(source, str(target), MdsOptions()).samples == 5
        back = opened(target)
        assert [back.document_span(n)[1] for n in range(5)] == ends.tolist()
        assert np.array_equal(back.read(0, 44), np.arange(44))


def test_shards_of_one_size_with_samples_of_several_are_no_damage(tmp_path: Path) -> None:
    np.arange(800, dtype="<u2").tofile(tmp_path / "a.bin")
    np.array([200, 400, 550, 800], "<u8").tofile(tmp_path / "a.bin.index")
    source = opened(tmp_path / "a.bin", dtype="uint16", document_ends=".index")
    assert write_mds(source, str(tmp_path / "mds"), MdsOptions(shard_bytes=1200)).shards == 2
    shards = json.loads((tmp_path / "mds" / "index.json").read_text())["shards"]
    assert shards[0]["raw_data"]["bytes"] == shards[1]["raw_data"]["bytes"]
    back = opened(tmp_path / "mds")
    assert np.array_equal(back.read(0, 800), np.arange(800))
    assert back.document_span(2) == (400, 550)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"compression": "lz4"}, "compression=lz4 is not supported\nallowed: zstd"),
        ({"hashes": ("crc",)}, "the hash 'crc' is not known"),
        ({"seq_len": 10**9}, "allowed: 1 to"),
        ({"shard_bytes": 10}, "a shard cannot have 10 bytes"),
    ],
)
def test_options_that_cannot_be_met(tokens: Source, tmp_path: Path, options: dict[str, object], told: str) -> None:
    with pytest.raises(UserError, match=told):
        write_mds(tokens, str(tmp_path / "mds"), MdsOptions(**options))
    assert not (tmp_path / "mds").exists()


def test_a_writer_that_was_cut_off_leaves_no_data_set_and_is_followed_by_another(
    tokens: Source, tmp_path: Path
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    target = str(tmp_path / "mds")
    with pytest.raises(KeyboardInterrupt):
        write_mds(tokens, target, MdsOptions(7, shard_bytes=1024), stop)
    left = os.listdir(target)
    assert left
    assert "index.json" not in left
    write_mds(tokens, target, MdsOptions(33, shard_bytes=4096))
    assert np.array_equal(opened(Path(target)).read(0, 66), tokens.read(0, 66))
    named = {entry["raw_data"]["basename"] for entry in json.loads(Path(target, "index.json").read_text())["shards"]}
    assert named | {"index.json"} == set(os.listdir(target))
    with pytest.raises(UserError, match=r"already holds an index\.json"):
        write_mds(tokens, target, MdsOptions(33))
    (Path(target) / "index.json").unlink()
    before = sorted(os.listdir(target))
    with pytest.raises(UserError, match=r"is not empty: it holds 'shard\.00000\.mds'"):  # whose, nobody knows
        write_mds(tokens, target, MdsOptions(33))
    assert sorted(os.listdir(target)) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match=r"is not empty: it holds 'thesis\.txt'"):
        write_mds(tokens, str(tmp_path / "mine"), MdsOptions(33))


def test_the_command(tokens: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["data", "to-mds", str(tmp_path / "ours"), str(tmp_path / "mds"), "--seq-len", "32"]
    assert smalti([*arguments, "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "mds").exists()
    assert smalti([*arguments, "--json", "--compression", "zstd", "--hashes", "sha1,xxh64"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == opened(tmp_path / "mds").n_tokens
    assert opened(tmp_path / "mds").checked == "whole shards (sha1, xxh64)"
    assert smalti(arguments) == 2
    assert "already holds" in capsys.readouterr().err
    assert smalti([*arguments[:3], str(tmp_path / "x"), "--dtype", "float"]) == 2


def test_the_commands_take_the_fields_of_a_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.tile(np.array([5, 6, 7, 0], "<u2"), 20).tofile(tmp_path / "raw.bin")
    raw = [str(tmp_path / "raw.bin"), "dtype=uint16", "eod_id=0"]
    assert smalti(["data", "to-mds", raw[0], str(tmp_path / "mds"), *raw[1:], "--dtype", "int64", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 20
    assert opened(tmp_path / "mds").read(0, 8).tolist() == [5, 6, 7, 0] * 2
    assert smalti(["data", "pack", *raw, "--seq-len", "8", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["documents"] == 20
    assert smalti(["data", "pack", raw[0], "colour=red", "--seq-len", "8"]) == 2


@pytest.mark.parametrize("how", ["packed", "many"])
def test_later_shards_of_the_same_size_may_have_samples_of_other_sizes(tmp_path: Path, how: str) -> None:
    """Tables of packed shards, and of more than 64, are not read at opening."""
    same, others = [200, 400], [150, 400]
    n_shards = 3 if how == "packed" else 70
    ends = [at + 400 * n for n in range(n_shards) for at in (others if n in (1, n_shards - 1) else same)]
    np.arange(400 * n_shards, dtype="<u2").tofile(tmp_path / "a.bin")
    np.array(ends, "<u8").tofile(tmp_path / "a.bin.index")
    source = opened(tmp_path / "a.bin", dtype="uint16", document_ends=".index")
    compression = "zstd:5" if how == "packed" else None
    options = MdsOptions(shard_bytes=1200, dtype="uint16", compression=compression)
    assert write_mds(source, str(tmp_path / "mds"), options).shards == n_shards
    back = opened(tmp_path / "mds")
    assert np.array_equal(back.read(0, back.n_tokens), np.arange(400 * n_shards) % 65536)
    out = np.empty((n_shards, 300), back.dtype)
    back.read_rows(np.arange(n_shards) * 390, out)
    assert np.array_equal(out, (np.arange(n_shards)[:, None] * 390 + np.arange(300)) % 65536)
    back.verify()
    index = tmp_path / "mds" / "index.json"
    text = index.read_text()
    damaged = json.loads(text)
    damaged["shards"][0]["column_names"] = ["other"]
    index.write_text(json.dumps(damaged))
    with pytest.raises(DataError, match="shard 1 has other columns than the shards before"):
        opened(tmp_path / "mds")


def shard_of(samples: list[np.ndarray], size: int | None, extra: bytes) -> bytes:
    """A column ``a_note`` of bytes and a column ``tokens`` of uint16, both fixed or (size None) both varying."""
    width = 0 if size is not None else 8
    parts = [
        (b"" if size is not None else np.array([len(extra), 2 * one.size], "<u4").tobytes()) + extra + one.tobytes()
        for one in samples
    ]
    offsets = np.cumsum([4 * (len(parts) + 2), *map(len, parts)])
    assert all(len(part) == width + len(extra) + 2 * one.size for part, one in zip(parts, samples, strict=True))
    return np.array([len(parts), *offsets], "<u4").tobytes() + b"".join(parts)


@pytest.mark.parametrize("fixed", [[4, 6], [4, None], [None, 4], [4, 4]])
def test_column_sizes_may_differ_from_shard_to_shard(tmp_path: Path, fixed: list[int | None]) -> None:
    entries, expected = [], []
    for number, count in enumerate(fixed):
        samples = [np.arange(count or 3 + n, dtype="<u2") + 100 * number + 10 * n for n in range(5)]
        note = b"n" * (number + 1)
        size = None if count is None else 2 * count
        data = shard_of(samples, size, note)
        (tmp_path / f"{number}.mds").write_bytes(data)
        expected += samples
        entries.append({
            "column_names": ["a_note", "tokens"], "column_encodings": ["bytes", "bytes"], "compression": None,
            "column_sizes": [None if count is None else len(note), size], "format": "mds", "version": 2, "samples": 5,
            "raw_data": {"basename": f"{number}.mds", "bytes": len(data), "hashes": {}}, "zip_data": None,
        })  # fmt: skip
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    back = opened(tmp_path, column="tokens", dtype="uint16")
    assert np.array_equal(back.read(0, back.n_tokens), np.concatenate(expected))
    back.verify()
