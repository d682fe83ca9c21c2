"""Opens the files of a folder, local or in a store."""

from collections.abc import Sequence
from typing import Any

from smalti.base import store
from smalti.config.data import FetchConfig
from smalti.data.fetch.counts import Counts
from smalti.data.fetch.files import Files, Share
from smalti.data.fetch.local import LocalFiles


def open_files(
    path: str,
    *,
    mirrors: Sequence[str] = (),
    fetch: FetchConfig = FetchConfig(),  # noqa: B008 - frozen
    share: Share = Share(),  # noqa: B008 - a tuple
    digest: str | None = None,
    counts: Counts | None = None,
) -> Files:
    """Open the folder ``path``, local or a URL; ``mirrors`` are read if it fails. Nothing is read yet.

    digest: digest of the content, if every read is checked against it; without one, ``fetch.cache`` is not used.
    counts: counters to which the cost of reading is added; None: new ones.
    """
    counts = counts or Counts()
    if store.is_local(path):
        options: dict[str, Any] = {"fetch": fetch, "share": share, "digest": digest, "counts": counts}
        return LocalFiles(path, counts, open_files(mirrors[0], mirrors=mirrors[1:], **options) if mirrors else None)
    from smalti.data.fetch.remote import RemoteFiles

    return RemoteFiles((path, *mirrors), fetch, share, digest, counts)
