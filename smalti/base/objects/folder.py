"""The interface of a folder of objects, and those on disks and of fsspec."""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from smalti.base import cloud, disk, store
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.objects.requests import Requests

T = TypeVar("T")


class Folder(Protocol):
    """A folder; paths are relative to it, with ``/``. Thread-safe."""

    url: str

    def names(self) -> list[str]:
        """Return the sorted names directly below, of one listing; empty where there are none."""

    def sizes(self, below: str) -> dict[str, int]:
        """Return path -> bytes of all objects below a folder; empty where there are none."""

    def get(self, path: str) -> bytes:
        """Return a whole object. Raises FileNotFoundError."""

    def put(self, path: str, data: bytes) -> None:
        """Write a whole object, over one that exists."""

    def put_new(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists, and return whether it was written.

        False also where an attempt whose response was lost has written it. A store without conditional writes is asked
        whether the object exists first, and two writers at the same moment may then both get True.
        """

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, if they exist."""


def open_folder(url: str, requests: Requests) -> Folder:
    """Return the folder at a path or URL. Raises UserError where nothing can be written there (``https:``, ``hf:``)."""
    if url.startswith(("http://", "https://", "hf://")):
        raise UserError(f"{url} cannot be written", allowed="a path, s3://, gs://, az://, or a URL of fsspec")
    if cloud.is_cloud(url):
        from smalti.base.objects.cloud import CloudFolder

        return CloudFolder(url, requests)
    if url.startswith(("file://", "local://")):
        url = url.partition("://")[2]
    return LocalFolder(url) if store.is_local(url) else FsspecFolder(url, requests)


class LocalFolder:
    """A folder on a disk. Its parent must exist, so that a disk that is not mounted is not an empty one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._root = Path(url)

    def names(self) -> list[str]:
        """Return the names directly below."""
        if not self._root.exists() and not self._root.absolute().parent.is_dir():
            raise DataError(
                f"{self.url} cannot be listed: there is no folder {self._root.parent}",
                hint="mount the disk, or create that folder",
            )
        return self._guarded(lambda: sorted(os.listdir(self._root))) or []

    def sizes(self, below: str) -> dict[str, int]:
        """Return path -> bytes of all files below a folder."""

        def walk() -> dict[str, int]:
            files = [path for path in (self._root / below).rglob("*") if path.is_file()]
            return {path.relative_to(self._root).as_posix(): path.stat().st_size for path in files}

        return self._guarded(walk) or {}

    def get(self, path: str) -> bytes:
        """Return a whole file."""
        data = self._guarded((self._root / path).read_bytes)
        if data is None:
            raise FileNotFoundError(self._root / path)
        return data

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file."""
        with disk.writing(self._root / path):
            store.write_bytes(self._root / path, data)

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists; by a hard link, which no two writers get."""
        temporary = f"{path}.{os.getpid()}.new"
        self.put(temporary, data)
        try:
            os.link(self._root / temporary, self._root / path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            if (self._root / path).exists():
                return False
            self.put(path, data)
        finally:
            (self._root / temporary).unlink(missing_ok=True)
        return True

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files, and the folders that are empty then."""
        for path in paths:
            with disk.writing(self._root):
                (self._root / path).unlink(missing_ok=True)
            for parent in (self._root / path).relative_to(self._root).parents[:-1]:
                with suppress(OSError):
                    (self._root / parent).rmdir()

    def _guarded(self, read: Callable[[], T]) -> T | None:
        """Return the result of ``read``; None where there is no such file."""
        try:
            return read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RetryableError(
                f"{self.url} cannot be read: {error}", hint="repair the access to it, then run the same command again"
            ) from error


class FsspecFolder:
    """A folder of any other file system that fsspec opens."""

    def __init__(self, url: str, requests: Requests) -> None:
        import fsspec

        self.url = url
        self._requests = requests
        self._filesystem: Any
        self._filesystem, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")

    def names(self) -> list[str]:
        """Return the names directly below."""
        paths = self._found(lambda: self._filesystem.ls(self._root, detail=False)) or []
        return sorted(os.path.basename(path.rstrip("/")) for path in paths)

    def sizes(self, below: str) -> dict[str, int]:
        """Return path -> bytes of all files below a folder."""
        files = self._found(lambda: self._filesystem.find(f"{self._root}/{below}", detail=True)) or {}
        return {path[path.index(f"/{below}/") + 1 :]: int(facts["size"]) for path, facts in files.items()}

    def get(self, path: str) -> bytes:
        """Return a whole file."""
        return bytes(self._send("read", path, lambda full: self._filesystem.cat_file(full)))

    def put(self, path: str, data: bytes) -> None:
        """Write a whole file."""
        self._send("written", path, lambda full: self._write(full, data, "overwrite"))

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a file unless it exists, as far as the file system can."""
        return self._send("written", path, lambda full: self._write(full, data, "create"))

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files."""
        for path in paths:
            with suppress(FileNotFoundError):
                self._send("deleted", path, lambda full: self._filesystem.rm_file(full))

    def _write(self, full: str, data: bytes, mode: str) -> bool:
        self._filesystem.makedirs(os.path.dirname(full), exist_ok=True)
        try:
            self._filesystem.pipe_file(full, data, mode=mode)
        except FileExistsError:
            return False
        return True

    def _found(self, look: Callable[[], T]) -> T | None:
        """Return the result of ``look``; None where there is no such folder."""
        try:
            self._filesystem.invalidate_cache()
            return self._requests.send(self.url, "listed", look)
        except FileNotFoundError:
            return None

    def _send(self, action: str, path: str, request: Callable[[str], T]) -> T:
        return self._requests.send(store.join(self.url, path), action, lambda: request(f"{self._root}/{path}"))
