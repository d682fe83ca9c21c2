"""Storage: whole or not at all, locally and on an object store, and errors that name the file."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from smalti.base import store
from smalti.base.errors import DataError


@pytest.fixture(params=["local", "memory", "file"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder on each kind of storage."""
    if request.param == "memory":
        filesystem = fsspec.filesystem("memory")
        yield "memory://bucket/run"
        filesystem.store.clear()
        filesystem.pseudo_dirs[:] = [""]
    else:
        yield str(tmp_path / "run") if request.param == "local" else f"file://{tmp_path}/run"


def fail_while_writing(path: str, error: BaseException) -> None:
    with store.open_write(path) as file:
        file.write(b"half of it")
        raise error


def test_round_trips(root: str) -> None:
    path = store.join(root, "a", "b.bin")
    store.write_bytes(path, b"0123456789")
    assert store.read_bytes(path) == b"0123456789"
    assert store.size_bytes(path) == 10
    store.write_text(path, "Größe\n")
    assert store.read_text(path) == "Größe\n"
    store.write_json(path, {"a": [1, None, "ä"]})
    assert store.read_json(path) == {"a": [1, None, "ä"]}


@pytest.mark.parametrize(
    ("start", "length", "expected"), [(0, 10, b"0123456789"), (3, 4, b"3456"), (8, 9, b"89"), (4, 0, b""), (10, 2, b"")]
)
def test_ranges(root: str, start: int, length: int, expected: bytes) -> None:
    path = store.join(root, "file")
    store.write_bytes(path, b"0123456789")
    assert store.read_range(path, start, length) == expected
    with pytest.raises(DataError, match="nowhere does not exist"):
        store.read_range(store.join(root, "nowhere"), start, length)


def test_a_block_that_raises_leaves_nothing(root: str) -> None:
    path = store.join(root, "half")
    with pytest.raises(RuntimeError, match="disk on fire"):
        fail_while_writing(path, RuntimeError("disk on fire"))
    assert not store.exists(path)


def test_a_block_that_raises_keeps_the_old_file(root: str) -> None:
    path = store.join(root, "kept")
    store.write_bytes(path, b"before")
    with pytest.raises(KeyboardInterrupt):
        fail_while_writing(path, KeyboardInterrupt())
    assert store.read_bytes(path) == b"before"


def test_nothing_is_seen_before_the_end(root: str) -> None:
    path = store.join(root, "slow")
    with store.open_write(path) as file:
        file.write(b"x" * 100_000)
        file.flush()
        assert not store.exists(path)
    assert store.size_bytes(path) == 100_000


def test_no_temporary_stays(root: str) -> None:
    for name in ("b", "a"):
        store.write_bytes(store.join(root, name), b"")
    with pytest.raises(RuntimeError):
        fail_while_writing(store.join(root, "c"), RuntimeError())
    assert store.list_folder(root) == ["a", "b"]


def test_listing(root: str) -> None:
    store.write_bytes(store.join(root, "z"), b"")
    store.write_bytes(store.join(root, "sub", "deep", "file"), b"")
    assert store.list_folder(root) == ["sub", "z"]
    assert store.list_folder(root + "/") == ["sub", "z"]
    with pytest.raises(DataError, match="does not exist"):
        store.list_folder(store.join(root, "nowhere"))
    with pytest.raises(DataError, match="is a file"):
        store.list_folder(store.join(root, "z"))


@pytest.mark.parametrize("read", [store.read_bytes, store.read_text, store.read_json, store.size_bytes])
def test_a_missing_file_is_named(root: str, read: Any) -> None:
    path = store.join(root, "nowhere.bin")
    with pytest.raises(DataError, match=r"nowhere\.bin does not exist"):
        read(path)


def test_a_folder_is_no_file(root: str) -> None:
    store.write_bytes(store.join(root, "sub", "file"), b"")
    with pytest.raises(DataError, match="is a folder"):
        store.read_bytes(store.join(root, "sub"))


def test_files_of_another_kind(root: str) -> None:
    path = store.join(root, "file")
    store.write_bytes(path, b"{broken")
    with pytest.raises(DataError, match="not valid JSON"):
        store.read_json(path)
    store.write_bytes(path, b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        store.read_text(path)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    store.write_bytes(path, b"before")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write_bytes(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["file"]


def test_a_put_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    with pytest.raises(PermissionError):
        store.write_bytes("memory://bucket/refused", b"x")
    assert not store.exists("memory://bucket/refused")


def test_names() -> None:
    assert store.join("a/", "/b/", "c") == "a/b/c"
    assert store.join("s3://bucket", "x") == "s3://bucket/x"
    assert store.join(Path("/a"), "b") == "/a/b"
    assert store.is_local("a/b")
    assert store.is_local(Path("a"))
    assert not store.is_local("s3://bucket/a")


def test_make_folder(tmp_path: Path) -> None:
    made = store.make_folder(tmp_path / "a" / "b")
    assert os.path.isdir(made)
    assert store.make_folder("memory://bucket/none") == "memory://bucket/none"


def test_a_place_that_takes_no_folder_is_an_error_of_the_users(tmp_path: Path) -> None:
    for make in (store.make_folder, lambda url: store.write_text(f"{url}/x", "y")):
        with pytest.raises(DataError, match="no folder can be made at /proc/smalti"):
            make("/proc/smalti")
