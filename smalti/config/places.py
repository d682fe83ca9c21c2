"""Validates paths and URLs in a config: schemes, and URLs with credentials, which raise NotAllowed.

An error about a URL with credentials does not repeat it. Whether a file exists is not checked.
"""

import re
from typing import Annotated
from urllib.parse import parse_qsl

from pydantic import AfterValidator

from smalti.base.cloud import SCHEMES
from smalti.base.errors import nearest
from smalti.config.schema import NotAllowed

_KNOWN = "s3://, gs://, az://, abfss://, http://, https://, hf://, or a path without a scheme"
_NEVER_USER = ("s3", "s3a", "gs", "gcs", "http", "https", "hf")
_NEVER_COLON = ("s3", "s3a", "gs", "gcs", "hf", "az", "azure", "adl", "abfs", "abfss")
_ENVIRONMENT = "keys come from the environment (AWS_ACCESS_KEY_ID ...; a second store: ?keys=PREFIX), see docs/guides/"


def check_place(text: str) -> str:
    """Return ``text``, a path or URL.

    Raises NotAllowed for an unknown scheme, and for a URL without a bucket, repository or host, or with credentials.
    """
    scheme, mark, rest = re.sub(r"^([a-z]+::)+", "", text).partition("://")
    if not mark:
        one_slash = re.match(r"([a-z][a-z0-9]+):/", text)
        if one_slash and one_slash[1] in SCHEMES:
            raise NotAllowed(
                f"'{_shown(text)}' is neither a path nor a URL",
                allowed=_KNOWN,
                hint=f"write {one_slash[1]}://, with two slashes",
            )
        return text
    host, _, after = rest.partition("/")
    host, _, query = host.partition("?") if "?" in host else (host, "", after.partition("?")[2])
    _refuse_credentials(scheme, host, query)
    if scheme not in SCHEMES and not _fsspec_knows(scheme):
        close = nearest(scheme.lower(), SCHEMES)
        raise NotAllowed(
            f"'{_shown(text)}' has the scheme '{scheme}://', which is not supported",
            allowed=_KNOWN,
            hint=f"did you mean {close}://?" if close else "copy the data to one of those, or to a local folder",
        )
    if scheme in SCHEMES and not host:
        what = {"hf": "repository", "http": "host", "https": "host"}.get(scheme, "bucket")
        raise NotAllowed(
            f"'{_shown(text)}' names no {what}", allowed=_KNOWN, hint=f"{scheme}://{what.upper()}/path/to/folder"
        )
    return text


Place = Annotated[str, AfterValidator(check_place)]
"""A local path, or the URL of a folder or file in a store."""


def check_local(text: str) -> str:
    """Return ``text``, a local path. Raises NotAllowed for a URL."""
    if "://" in text:
        raise NotAllowed(
            f"'{_shown(text)}' is not a local path",
            allowed="a local path; object stores hold data only",
            hint="name a folder on a disk of this machine, or on one that all machines share",
        )
    return text


LocalFolder = Annotated[str, AfterValidator(check_local)]
"""A folder for output, which needs renames and locks: object stores have neither."""


def _refuse_credentials(scheme: str, host: str, query: str) -> None:
    options = dict(parse_qsl(query, keep_blank_values=True))
    user, at, _ = host.rpartition("@")
    secret = (at and (":" in user or scheme in _NEVER_USER)) or (":" in host and scheme in _NEVER_COLON)
    if scheme in ("http", "https"):
        secret = secret or not re.fullmatch(r"(\[[0-9a-fA-F:.]*\]|[^:]*)(:\d*)?", host)
    secret = secret or "@" in options.get("endpoint", "")
    secret = secret or any(re.search(r"(?i)sig|token|secret|credential|password|access", name) for name in options)
    if secret:
        raise NotAllowed(
            f"this {scheme}:// URL seems to hold credentials (it is not repeated here), and a config is kept and shown",
            allowed=f"{scheme}://BUCKET-OR-HOST/path, without keys, tokens and passwords",
            hint=_ENVIRONMENT + "object-stores.md",
        )


def _shown(text: str) -> str:
    text = text.partition("?")[0]
    return f"...{text[text.rindex('@') :]}" if "@" in text else text


def _fsspec_knows(scheme: str) -> bool:
    import fsspec

    return scheme in fsspec.available_protocols()


def check_run_name(name: str) -> str:
    """Return ``name``, which is also that of a folder."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        raise NotAllowed(
            f"'{name}' cannot be a folder name",
            allowed="1 to 100 letters, digits, '.', '_' and '-', the first a letter or digit",
            hint=f"name={re.sub('[^A-Za-z0-9._-]+', '-', name).lstrip('._-')[:100] or 'mine'}",
        )
    return name


RunName = Annotated[str, AfterValidator(check_run_name)]
"""The name of a run and of its folder."""
