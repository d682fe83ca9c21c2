"""A folder in an object store, through obstore.

Each object is one request, repeated by ``Requests`` and not by obstore, so that the rate counts every request and a
repeated one is signed with the newest credentials.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from smalti.base import cloud, store
from smalti.base.errors import DataError
from smalti.base.objects.ordered import ordered
from smalti.base.objects.requests import Requests

T = TypeVar("T")

_TIMEOUT_S = 300.0
"""Time for one object, which may be a part of 32 MiB over a slow link."""
_DELETES = 4
"""Most requests in flight that delete."""


class CloudFolder:
    """A folder of a bucket or container, which must exist."""

    def __init__(self, url: str, requests: Requests) -> None:
        self.url = url
        self._requests = requests
        self._root, self._prefix = cloud.split(url)
        self._is_s3 = self._root.startswith(("s3://", "s3a://"))

    def names(self) -> list[str]:
        """Return the names directly below; one request for each thousand."""

        def look(obstore: Any, opened: Any, key: str) -> list[str]:
            listing = obstore.list_with_delimiter(opened, key or None)
            paths = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
            return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

        return self._in_bucket("listed", "", look)

    def sizes(self, below: str) -> dict[str, int]:
        """Return path -> bytes of all objects below a folder; one request for each thousand."""
        skipped = len(self._prefix) + 1 if self._prefix else 0

        def look(obstore: Any, opened: Any, key: str) -> dict[str, int]:
            sizes = {}
            for page in self._pages(obstore.list(opened, f"{key}/", chunk_size=1000)):
                sizes.update({entry["path"][skipped:]: int(entry["size"]) for entry in page})
            return sizes

        return self._in_bucket("listed", below, look)

    def get(self, path: str) -> bytes:
        """Return a whole object."""
        try:
            return self._send("read", path, lambda obstore, opened, key: bytes(obstore.get(opened, key).bytes()))
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error) or "ContainerNotFound" in str(error):
                raise self._no_bucket(error) from error
            raise

    def put(self, path: str, data: bytes) -> None:
        """Write an object in one request."""
        self._in_bucket(
            "written", path, lambda obstore, opened, key: obstore.put(opened, key, data, use_multipart=False)
        )

    def put_new(self, path: str, data: bytes) -> bool:
        """Write an object unless it exists, by a conditional request (``If-None-Match: *``)."""

        def create(obstore: Any, opened: Any, key: str) -> bool | None:
            try:
                obstore.put(opened, key, data, mode="create")
            except Exception as error:
                if type(error).__name__ == "AlreadyExistsError":
                    return False
                if "status code: 501" in str(error) or type(error).__name__ == "NotSupportedError":
                    return None
                raise
            return True

        created = self._in_bucket("written", path, create)
        if created is not None:
            return created
        try:  # the store has no conditional writes
            self.get(path)
        except FileNotFoundError:
            self.put(path, data)
            return True
        return False

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, if they exist: up to 1000 in a request to S3, and one to GCS and Azure, for which one that is
        absent is an error."""

        def delete(some: tuple[str, ...]) -> None:
            keys = [self._key(path) for path in some]
            try:
                self._send("deleted", "", lambda obstore, opened, key: obstore.delete(opened, keys))
            except FileNotFoundError as error:
                if self._is_s3:
                    raise self._no_bucket(error) from error

        for _ in ordered(delete, _batched(paths, 1000 if self._is_s3 else 1), _DELETES):
            pass

    def _pages(self, stream: Iterable[T]) -> Iterator[T]:
        """Yield the pages of a listing, each of which is one more request."""
        for number, page in enumerate(stream):
            if number:
                self._requests.wait_for_turn()
            yield page

    def _in_bucket(self, action: str, path: str, what: Callable[[Any, Any, str], T]) -> T:
        """Send a request that finds nothing only where the bucket does not exist."""
        try:
            return self._send(action, path, what)
        except FileNotFoundError as error:
            raise self._no_bucket(error) from error

    def _send(self, action: str, path: str, what: Callable[[Any, Any, str], T]) -> T:
        import obstore

        cloud.guard_fork()

        def request() -> T:  # opened again each time: the credentials in the environment may have changed
            opened = cloud.open_store(self._root, timeout_s=_TIMEOUT_S, retries=False)
            return what(obstore, opened, self._key(path))

        return self._requests.send(store.join(self.url, path) if path else self.url, action, request)

    def _key(self, path: str) -> str:
        return f"{self._prefix}/{path}".strip("/")

    def _no_bucket(self, error: Exception) -> DataError:
        return DataError(
            f"{self._root.partition('?')[0]} does not exist: {cloud.reason(error)}",
            hint="create the bucket or container, or correct its name",
        )


def _batched(items: Iterable[str], size: int) -> Iterator[tuple[str, ...]]:
    listed = list(items)
    return (tuple(listed[start : start + size]) for start in range(0, len(listed), size))
