"""Object stores and HTTP through obstore: opens URLs and interprets errors.

Only this module and ``objects/cloud.py`` import obstore. Supports S3 and compatible stores (by endpoint), GCS, Azure,
HTTP(S) and the Hugging Face Hub. Credentials come from each cloud's environment variables, which obstore reads (see
docs/guides/object-stores.md), or for S3 from a file that is read again as they expire. Reading never lists. A process
forked from one that has read from a store lacks its threads: a request there raises an error instead of hanging.
"""

import os
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import parse_qsl, urlsplit

from smalti.base import env
from smalti.base.errors import DataError, RetryableError, SmaltiError, UserError, missing_extra

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "adl", "abfs", "abfss", "http", "https", "hf")
"""Schemes of URLs that are opened here; fsspec opens the others."""

_S3_OPTIONS = ("endpoint", "region", "keys")

Trouble = Literal["missing", "forbidden", "keyless", "short", "refused", "unranged", "slow", "again"]
"""The kinds of error, in order: no such file; access denied; no credentials; the range is past the end of the file; a
request that can never succeed; a whole file, or a page, instead of a range; the store asks for fewer requests; a
transient error."""

ODD_ANSWERS = 4
"""Number of odd answers (a 200 to a ranged read, an error page instead of a file) to one request after which they are
final, from a store that has never given a correct one."""


def is_cloud(url: str) -> bool:
    """Return whether a URL is opened here."""
    return url.partition("://")[0] in SCHEMES and "://" in url


def split(url: str) -> tuple[str, str]:
    """Split a URL into (root, path): bucket, container, host or repository with its options, and the rest."""
    parts = urlsplit(url, allow_fragments=False)  # a name may have a #
    path = parts.path.strip("/")
    if parts.scheme == "hf":
        root, path = _hub(parts.netloc + parts.path)
        return root, path
    options = f"?{parts.query}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}{options}", path


def open_store(root: str, *, timeout_s: float, retries: bool) -> Any:
    """Return the obstore store of a root of ``split``; one for each process, with its pool of connections.

    retries: use obstore's own retries, for single small files; the fetch engine retries itself and must see failures.
    """
    env.drop_empty_store_variables()
    return _opened(root, timeout_s, retries, env.store_settings())


def guard_fork() -> None:
    """Call before each request. Raises SmaltiError in a process forked after its parent has made one."""
    if _first_process() != os.getpid():
        raise SmaltiError(
            "this process was forked from one that had read from a store over a network, and cannot read from it",
            hint="start processes by spawn or forkserver: multiprocessing.get_context('spawn')",
        )


@cache
def _first_process() -> int:
    """Return the id of the process that made the first request, which a fork inherits."""
    return os.getpid()


def trouble(error: BaseException) -> Trouble:
    """Classify an error of a store; obstore gives status codes only in its text."""
    if isinstance(error, FileNotFoundError):
        return "missing"
    if isinstance(error, PermissionError) or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return "forbidden"
    text = str(error)
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        return "keyless"  # none are set, and this machine has no role that provides them
    match = re.search(r"status code: (\d{3})", text)
    code = int(match[1]) if match else 0
    if code == 416:
        return "short"
    if code == 429 or (code == 503 and re.search("SlowDown|reduce your request rate|ServerBusy", text)):
        return "slow"
    if code in (401, 403) or (code == 400 and "ExpiredToken" in text):
        return "forbidden"
    if code == 404:  # a listing of a bucket that does not exist
        return "missing"
    if code == 400 and "RequestTimeout" in text:  # S3 on a connection that was idle
        return "again"
    if 400 <= code < 500 and code != 408:
        return "refused"
    if "non-partial response" in text or "ange request not supported" in text:
        return "unranged"
    if isinstance(error, (ValueError, NotImplementedError)) or type(error).__name__ in (
        "NotSupportedError",
        "InvalidPathError",
        "UnknownConfigurationKeyError",
    ):
        return "refused"
    if "without LOCATION" in text:
        return "refused"
    return "again"


def reason(error: BaseException) -> str:
    """Return an error in one line, without obstore's "Debug source"."""
    if isinstance(error, TimeoutError):
        return str(error) or "no answer in time"
    text = str(error).partition("\n\nDebug source")[0].strip() or type(error).__name__
    return re.sub(r"\s+", " ", text)[:500]


def final_error(url: str, error: BaseException, action: str = "read") -> SmaltiError:
    """Return the error for a request that failed for good; ``action``: what was done, in the passive."""
    kind = trouble(error)
    if kind == "missing":
        return DataError(f"{url} does not exist", hint="compare the path with the contents of the store")
    if kind in ("forbidden", "keyless"):
        return DataError(
            f"{url} cannot be {action}, access is denied: {reason(error)}",
            hint=f"set the credentials of this store ({_variables(url)}); docs/guides/object-stores.md",
        )
    if kind == "short":
        return DataError(f"{url} ends before the requested bytes", hint="copy the file again")
    if kind == "unranged":
        return DataError(
            f"{url} cannot be read: {ODD_ANSWERS} times {reason(error)}",
            hint="this server does not support range requests: use another one, or copy the folder",
        )
    if kind == "refused":
        by_region = "without LOCATION" in str(error)
        hint = "compare endpoint, region and credentials with docs/guides/object-stores.md"
        return DataError(
            f"{url} cannot be {action}: {reason(error)}",
            hint="the bucket is in another region: set AWS_REGION" if by_region else hint,
        )
    return RetryableError(
        f"{url}: the store does not respond correctly: {reason(error)}",
        hint=f"run it again when it does; {unreachable_hint(url)}",
    )


def unreachable_hint(url: str) -> str:
    """Return what to check where a store does not respond: for S3 the endpoint."""
    if url.partition("://")[0] not in ("s3", "s3a") or "endpoint=" in url:
        return "check address and network (docs/guides/object-stores.md)"
    variable = env.store_settings().s3_variable
    if variable:
        return f"the endpoint is that of {variable}: check it, and whether the store is reachable from this machine"
    return "the endpoint is Amazon's: for another S3 store set AWS_ENDPOINT_URL, or write ?endpoint=... in the URL"


def begins(data: bytes | memoryview) -> str:
    """Return the start of a response, for messages."""
    return repr(" ".join(bytes(data[:300]).decode("utf-8", "replace").split())[:80])


def is_page(data: bytes | memoryview, name: str) -> bool:
    """Return whether a response is HTML or XML while the file's name is of neither."""
    path = name.partition("?")[0].lower()
    if path.endswith((".html", ".htm", ".xml", ".svg", ".md", ".txt")):
        return False
    start = bytes(data[:64]).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    return start.startswith((b"<!", b"<?xml", b"<html", b"<head", b"<body", b"<error"))


def page_error(url: str, data: bytes | memoryview) -> RetryableError:
    """Return the error for a page that was repeatedly returned instead of a file."""
    return RetryableError(
        f"{url}: a page was returned instead of the file, {ODD_ANSWERS} times or more; it begins with {begins(data)}",
        hint="check the address, and whether it needs a login; if both are right, run the same command again later",
    )


def _variables(url: str) -> str:
    scheme = url.partition("://")[0]
    if scheme in ("gs", "gcs"):
        return "GOOGLE_APPLICATION_CREDENTIALS"
    if scheme in ("az", "azure", "adl", "abfs", "abfss"):
        return "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
    if scheme == "hf" or "/resolve" in url:
        return "HF_TOKEN"
    if scheme in ("http", "https"):
        return "use a host that needs none: only cloud stores take credentials"
    return "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for other stores than Amazon's also AWS_ENDPOINT_URL"


# ---- opening --------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _opened(root: str, timeout_s: float, retries: bool, settings: env.StoreSettings) -> Any:
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise missing_extra("obstore", "cloud", f"reading {root.partition('?')[0]}", error) from error
    wait = timedelta(seconds=timeout_s)
    client: Any = {
        "timeout": wait,
        "connect_timeout": min(wait, timedelta(seconds=5)),
        "allow_http": True,  # for endpoints that are http; https never falls back to it
        "user_agent": "smalti",
    }
    short = timedelta(milliseconds=100)
    backoff = {"init_backoff": short, "max_backoff": timedelta(seconds=5), "base": 2}
    retry: Any = {"max_retries": 8 if retries else 0, "retry_timeout": timedelta(minutes=2), "backoff": backoff}
    address, options = _address(root, settings)
    if root.startswith("hf://") and settings.hub_token:
        client["default_headers"] = {"Authorization": f"Bearer {settings.hub_token}"}
    try:
        return from_url(address, client_options=client, retry_config=retry, **options)
    except Exception as error:
        raise UserError(
            f"{root} cannot be opened: {reason(error)}", hint="docs/guides/object-stores.md says what each store needs"
        ) from error


def _address(root: str, settings: env.StoreSettings) -> tuple[str, dict[str, Any]]:
    """Return the address for obstore and its options."""
    parts = urlsplit(root)
    if parts.scheme == "hf":
        return f"{settings.hub_endpoint}/{root.removeprefix('hf://')}", {}
    options: dict[str, Any] = {}
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in query:
        if parts.scheme not in ("s3", "s3a") or name not in _S3_OPTIONS:
            raise UserError(
                f"'{name}' in {root}", allowed="in s3:// URLs: ?" + "=...&".join(_S3_OPTIONS) + "=...; elsewhere none"
            )
    if "endpoint" in query:
        options["endpoint"] = query["endpoint"]
        if settings.s3_endpoint:
            raise UserError(
                f"AWS_ENDPOINT_URL_S3 is set, and would override the endpoint in {root}",
                hint="set AWS_ENDPOINT_URL instead; an endpoint in a URL overrides that",
            )
    if "region" in query:
        options["region"] = query["region"]
    if "keys" in query:
        key, secret = env.store_keys(query["keys"])
        # not as options: a session token in the environment belongs to other keys
        credential = {"access_key_id": key, "secret_access_key": secret, "token": None, "expires_at": None}
        options["credential_provider"] = lambda: credential
    elif parts.scheme in ("s3", "s3a") and settings.s3_credentials_file:
        file = settings.s3_credentials_file
        env.s3_credentials(file)  # a file that cannot be used is an error now
        options["credential_provider"] = lambda: _credentials_of(file)
    return f"{parts.scheme}://{parts.netloc}", options


def _credentials_of(file: str) -> dict[str, Any]:
    """Return the keys in a file for obstore, which asks again before each request because they expire so soon."""
    key, secret, token = env.s3_credentials(file)
    expires_at = datetime.now(UTC) + timedelta(minutes=1)
    return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}


def _hub(rest: str) -> tuple[str, str]:
    """Split the rest of an ``hf://`` URL into (root, path).

    ``hf://datasets/ORG/NAME@REVISION/path`` is ``https://huggingface.co/datasets/ORG/NAME/resolve/REVISION/path``.
    """
    match = re.fullmatch(
        r"((?:datasets/|spaces/|buckets/)?)((?!datasets/|spaces/|buckets/)[\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.*))?",
        rest.strip("/"),
    )
    if match is None:
        raise UserError(
            f"hf://{rest} names no repository",
            allowed="hf://datasets/ORG/NAME/path, hf://datasets/ORG/NAME@REVISION/path, hf://buckets/ORG/NAME/path",
        )
    kind, repository, revision, path = match.groups()
    resolve = "resolve" if kind == "buckets/" else f"resolve/{revision or 'main'}"
    return f"hf://{kind}{repository}/{resolve}", (path or "").strip("/")


# ---- single small files, for base/store.py --------------------------------------------------------------------------

_TIMEOUT_S = 60.0


def size_bytes(url: str) -> int | None:
    """Return the size of a file; None where it does not exist."""
    try:
        return int(_request(lambda obstore, store, path: obstore.head(store, path), url)["size"])
    except FileNotFoundError:
        return None


def read_bytes(url: str) -> bytes:
    """Return the whole file. Raises FileNotFoundError."""
    for number in range(ODD_ANSWERS):
        _pause(number)
        data = bytes(_request(lambda obstore, store, path: obstore.get(store, path).bytes(), url))
        if not is_page(data, url):
            return data
    raise page_error(url, data)


def read_range(url: str, start: int, length: int) -> bytes:
    """Return bytes from ``start``; fewer at the end of the file. Raises FileNotFoundError."""
    if length == 0:
        return b""

    def get(obstore: Any, store: Any, path: str) -> Any:
        return obstore.get_range(store, path, start=start, length=length)

    return bytes(_request(get, url, past_end=b""))


def names(url: str) -> list[str]:
    """Return the base names directly below a folder; empty where it does not exist."""

    def look(obstore: Any, store: Any, path: str) -> Any:
        return obstore.list_with_delimiter(store, f"{path}/" if path else None)

    listing = _request(look, url)
    paths = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
    return sorted(os.path.basename(path.rstrip("/")) for path in paths)


def details(url: str) -> tuple[int, str] | None:
    """Return size and version of a file (see ``walk``); None where it does not exist."""
    try:
        meta = _request(lambda obstore, store, path: obstore.head(store, path), url)
    except FileNotFoundError:
        return None
    return int(meta["size"]), _version(url, meta)


def walk(url: str) -> Iterator[tuple[str, int, str]]:
    """Yield name below the folder, size and version of each file, in folders below too. Not of HTTP servers.

    The version changes with the content: the ETag, or where there is none the time of the last change.
    """
    folder = split(url)[1]
    prefix = f"{folder}/" if folder else ""

    def look(obstore: Any, store: Any, path: str) -> Any:
        return [entry for page in obstore.list(store, prefix or None) for entry in page]

    for entry in _request(look, url):
        yield entry["path"][len(prefix) :], int(entry["size"]), _version(url, entry)


def download(url: str, to: Path) -> str:
    """Write a file to a local one; returns the version that it had. Raises FileNotFoundError."""

    def get(obstore: Any, store: Any, path: str) -> str:
        result = obstore.get(store, path)
        with open(to, "wb") as file:
            for part in result.stream():
                file.write(part)
        return _version(url, result.meta)

    return str(_request(get, url))


def _version(url: str, meta: Any) -> str:
    if not meta["e_tag"] and meta["last_modified"].timestamp() == 0:  # what obstore has where there is none
        raise DataError(
            f"{url}: its server sends neither ETag nor Last-Modified, so a change would not be seen",
            hint="download the file, and name the copy",
        )
    # Azure quotes it in the answer to a request, but not in a list.
    return str(meta["e_tag"] or meta["last_modified"].isoformat()).strip('"')


def put(url: str, local_path: str) -> None:
    """Upload a local file in one request."""
    _request(lambda obstore, store, path: obstore.put(store, path, Path(local_path)), url)


def _request(what: Any, url: str, past_end: Any = None) -> Any:
    root, path = split(url)
    store = open_store(root, timeout_s=_TIMEOUT_S, retries=True)
    guard_fork()
    import obstore

    for number in range(1, ODD_ANSWERS + 1):
        try:
            return what(obstore, store, path)
        except FileNotFoundError:
            raise
        except Exception as error:
            if past_end is not None and trouble(error) == "short":
                return past_end
            if trouble(error) != "unranged" or number == ODD_ANSWERS:
                raise final_error(url, error) from error
        _pause(number)
    raise AssertionError("the last odd answer raises")


def _pause(number: int) -> None:
    """Wait before attempt ``number``; obstore itself waits between failures."""
    if number:
        time.sleep(0.1 * 2**number)
