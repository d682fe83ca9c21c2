"""The node's cache: shared without locks, checked when read, removes nothing that it did not write."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from smalti.data.fetch import Range
from smalti.data.fetch.cache import BlockCache


def wanted(number: int, length: int = 1000) -> Range:
    return Range("a.bin", number * 10_000, length)


def content(number: int, length: int = 1000) -> memoryview:
    return memoryview(bytes([number % 256]) * length)


def blocks(folder: Path) -> list[Path]:
    return sorted((folder / "smalti-blocks").glob("*/*"))


def test_what_was_put_is_found(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 1 << 20, "data")
    assert cache.get(wanted(1)) is None
    cache.put(wanted(1), content(1))
    assert cache.get(wanted(1)) == content(1)
    assert BlockCache(str(tmp_path), 1 << 20, "data").get(wanted(1)) == content(1)
    assert BlockCache(str(tmp_path), 1 << 20, "other data").get(wanted(1)) is None
    assert cache.get(Range("a.bin", 10_000, 999)) is None
    cache.drop(wanted(1))
    assert cache.get(wanted(1)) is None


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "longer", "magic"])
def test_a_block_that_is_not_what_was_written_is_a_miss(tmp_path: Path, spoil: str) -> None:
    cache = BlockCache(str(tmp_path), 1 << 20, "data")
    cache.put(wanted(1), content(1))
    (path,) = blocks(tmp_path)
    data = bytearray(path.read_bytes())
    if spoil == "flip":
        data[-1] ^= 1
    if spoil == "magic":
        data[0] ^= 1
    path.write_bytes({"cut": data[:-1], "empty": b"", "longer": data + b"x"}.get(spoil, bytes(data)))
    assert cache.get(wanted(1)) is None
    assert blocks(tmp_path) == []
    cache.put(wanted(1), content(1))
    assert cache.get(wanted(1)) == content(1)


def test_the_oldest_go(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 50_000, "data")
    for number in range(200):
        cache.put(wanted(number), content(number))
        path = Path(cache._path(wanted(number)))
        os.utime(path, (number, number))
    held = sum(path.stat().st_size for path in blocks(tmp_path))
    assert 30_000 <= held <= 55_000
    assert cache.get(wanted(0)) is None
    assert cache.get(wanted(199)) == content(199)


def test_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "theirs.bin").write_bytes(b"x" * 100_000)
    (tmp_path / "target.bin").write_bytes(b"y" * 100_000)
    cache = BlockCache(str(tmp_path), 20_000, "data")
    cache.put(wanted(0), content(0))
    (folder,) = (path.parent for path in blocks(tmp_path))
    (folder / "notes.txt").write_bytes(b"z" * 100_000)
    (folder / ("0" * 40 + ".block")).symlink_to(tmp_path / "target.bin")
    for number in range(100):
        cache.put(wanted(number), content(number))
    assert (tmp_path / "theirs.bin").exists()
    assert (tmp_path / "target.bin").exists()
    assert (folder / "notes.txt").exists()
    assert (folder / ("0" * 40 + ".block")).is_symlink()


def test_a_folder_of_that_name_that_somebody_else_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "smalti-blocks").mkdir()
    (tmp_path / "smalti-blocks" / "theirs").write_bytes(b"x")
    cache = BlockCache(str(tmp_path), 1 << 20, "data")
    cache.put(wanted(0), content(0))
    assert cache.get(wanted(0)) is None
    assert os.listdir(tmp_path / "smalti-blocks") == ["theirs"]
    assert "was not created by Smalti" in caplog.text


def test_temporaries_of_killed_processes_go(tmp_path: Path) -> None:
    cache = BlockCache(str(tmp_path), 20_000, "data")
    cache.put(wanted(0), content(0))
    (path,) = blocks(tmp_path)
    old, young = path.with_name("." + "1" * 40 + ".123.tmp"), path.with_name("." + "2" * 40 + ".123.tmp")
    for one in (old, young):
        one.write_bytes(b"half")
    os.utime(old, (0, 0))
    for number in range(100):
        cache.put(wanted(number), content(number))
    assert not old.exists()
    assert young.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    cache = BlockCache(str(tmp_path), 1 << 20, "data")
    cache.put(wanted(0), content(0))
    real = open

    def refuse(path: Any, mode: str = "r", **options: Any) -> Any:
        if "w" in mode:
            raise OSError(code, os.strerror(code))
        return real(path, mode, **options)

    monkeypatch.setattr("builtins.open", refuse)
    for number in range(1, 5):
        cache.put(wanted(number), content(number))
    assert cache.get(wanted(0)) == content(0)
    assert cache.get(wanted(1)) is None
    assert caplog.text.count("cannot write to the cache") == 1
    assert ("the disk at" in caplog.text) == (code != errno.EROFS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_may_not_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    cache = BlockCache(str(tmp_path / "cache"), 1 << 20, "data")
    cache.put(wanted(0), content(0))
    assert cache.get(wanted(0)) is None
    assert caplog.text.count("cannot create the cache") == 1


def test_a_place_that_is_no_folder(caplog: pytest.LogCaptureFixture) -> None:
    cache = BlockCache("/proc/nowhere/cache", 1 << 20, "data")
    cache.put(wanted(0), content(0))
    assert cache.get(wanted(0)) is None
    assert caplog.text.count("cannot create the cache") == 1


def test_many_ranks_share_it(tmp_path: Path) -> None:
    """Each thread has its own view, as ranks do; a small cache, so that they trim against each other."""
    wrong: list[int] = []

    def rank() -> None:
        cache = BlockCache(str(tmp_path), 30_000, "data")
        for number in [*range(60), *range(60)]:
            found = cache.get(wanted(number))
            if found is None:
                cache.put(wanted(number), content(number))
            elif found != content(number):
                wrong.append(number)

    ranks = [threading.Thread(target=rank) for _ in range(6)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
    assert wrong == []
    assert not [path for path in blocks(tmp_path) if path.suffix == ".tmp"]
