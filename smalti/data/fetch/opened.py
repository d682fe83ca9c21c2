"""``open_files``: the one way to a folder of files."""

from collections.abc import Sequence

from smalti.base import store
from smalti.config.data import FetchConfig
from smalti.data.fetch.files import Files, Share
from smalti.data.fetch.local import LocalFiles


def open_files(
    path: str,
    *,
    mirrors: Sequence[str] = (),
    fetch: FetchConfig = FetchConfig(),  # noqa: B008 - frozen
    share: Share = Share(),  # noqa: B008 - a tuple
    digest: str | None = None,
) -> Files:
    """The files below ``path``, a local folder or a URL; ``mirrors`` are copies, asked where it does not answer.

    digest: of the content, where every read is checked against it; what has none is never kept in ``fetch.cache``.
    Nothing is read or looked at yet.
    """
    if store.is_local(path):
        rest = open_files(mirrors[0], mirrors=mirrors[1:], fetch=fetch, share=share, digest=digest) if mirrors else None
        return LocalFiles(path, rest)
    from smalti.data.fetch.remote import RemoteFiles

    return RemoteFiles((path, *mirrors), fetch, share, digest)
