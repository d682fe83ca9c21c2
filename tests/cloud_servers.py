"""Google Cloud Storage and Azure Blob Storage as far as ``base/objects`` sends requests: a server in this process.

By the documentation of both (the XML API of GCS; the Blob service REST API): lists in pages, conditional writes; to
delete what is absent is an error. Authorization is not checked: real keys and quotas are untested.
"""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"
_PAGE = 5
"""Entries in a page of a listing."""


@dataclass
class Container:
    """A bucket ``box`` of GCS, or a container of Azure: its objects, and what was requested."""

    kind: str
    """``gs`` or ``az``."""
    objects: dict[str, bytes] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    lock: Any = field(default_factory=threading.Lock)
    url: str = ""

    def environment(self, folder: Path) -> dict[str, str]:
        """The variables of its clients; folder: for a key file."""
        if self.kind == "az":
            account = {"AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}
            return {**account, "AZURE_STORAGE_ENDPOINT": f"{self.url}/acc"}
        key = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": ""}
        (folder / "key.json").write_text(json.dumps({**key, "private_key_id": ""}))
        return {"GOOGLE_SERVICE_ACCOUNT": str(folder / "key.json")}

    def page(self, prefix: str, delimiter: str, after: str) -> tuple[list[str], list[str], str]:
        """(keys, common prefixes, where the next page begins or "") below a prefix."""
        entries = set()
        for key in self.objects:
            if key.startswith(prefix):
                rest, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key[len(prefix) :], "", "")
                entries.add(prefix + rest + cut)
        page = sorted(entry for entry in entries if entry > after)
        following = page[_PAGE - 1] if len(page) > _PAGE else ""
        folders = [entry for entry in page[:_PAGE] if delimiter and entry.endswith(delimiter)]
        return [entry for entry in page[:_PAGE] if entry not in folders], folders, following

    def page_text(self, query: dict[str, list[str]]) -> str:
        """The body of an answer to a listing."""
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        after = query.get("continuation-token", query.get("marker", [""]))[0]
        keys, folders, following = self.page(prefix, delimiter, after)
        sizes = {key: len(self.objects[key]) for key in keys}
        if self.kind == "gs":
            rows = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2015-10-21T07:28:00.000Z</LastModified>"
                f'<ETag>"1"</ETag><Size>{size}</Size></Contents>'
                for key, size in sizes.items()
            )
            rows += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
            following = f"<NextContinuationToken>{escape(following)}</NextContinuationToken>" if following else ""
            return f"<ListBucketResult>{rows}{following}</ListBucketResult>"
        rows = "".join(
            f"<Blob><Name>{escape(key)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified><Etag>1</Etag>"
            f"<Content-Length>{size}</Content-Length><Content-Type>a/b</Content-Type></Properties></Blob>"
            for key, size in sizes.items()
        )
        rows += "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in folders)
        marker = f"<NextMarker>{escape(following)}</NextMarker>"
        return f"<EnumerationResults><Blobs>{rows}</Blobs>{marker}</EnumerationResults>"

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """(status, body, headers) of the answer to a request."""
        parts = urlsplit(target)
        name, _, key = unquote(parts.path.removeprefix("/acc").lstrip("/")).partition("/")
        query = parse_qs(parts.query)
        if name != "box":
            code = "NoSuchBucket" if self.kind == "gs" else "ContainerNotFound"
            return 404, f"<Error><Code>{code}</Code></Error>".encode(), {}
        if not key:
            self.counts["DELETE" if method == "POST" else "LIST"] += 1
            return self._batch(body) if method == "POST" else (200, self.page_text(query).encode(), {})
        self.counts[method] += 1
        if method == "PUT":
            is_new = headers.get("x-goog-if-generation-match") == "0" or headers.get("if-none-match") == "*"
            if is_new and key in self.objects:
                return 412 if self.kind == "gs" else 409, b"<Error><Code>BlobAlreadyExists</Code></Error>", {}
            if self.kind == "az" and headers.get("x-ms-blob-type") != "BlockBlob":
                return 400, b"<Error><Code>InvalidHeaderValue</Code></Error>", {}
            self.objects[key] = body
            return 200 if self.kind == "gs" else 201, b"", {"x-goog-generation": "1"}
        if key not in self.objects:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        return (
            (204, b"", {}) if method == "DELETE" and self.objects.pop(key) is not None else (200, self.objects[key], {})
        )

    def _batch(self, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        """Azure's batch of deletions: an answer for each."""
        answers = []
        for number, path in enumerate(re.findall(r"\r\nDELETE /acc/box/(\S+) HTTP", body.decode())):
            is_there = self.objects.pop(unquote(path), None) is not None
            status = "202 Accepted" if is_there else "404 The specified blob does not exist."
            head = f"Content-Type: application/http\r\nContent-ID: {number}\r\n\r\nHTTP/1.1 {status}\r\n"
            answers.append(f"--batch\r\n{head}x-ms-request-id: 1\r\nx-ms-version: 2023-11-03\r\n\r\n")
        return 202, "".join([*answers, "--batch--\r\n"]).encode(), {"Content-Type": "multipart/mixed; boundary=batch"}


@contextmanager
def cloud_server(kind: str) -> Iterator[Container]:
    """A server with an empty container ``box``."""
    container = Container(kind)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = -1  # head and body in one packet

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with container.lock:
                status, content, headers = container.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            for name, value in {"ETag": '"1"', "Last-Modified": _DATE, "Content-Type": "a/b", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = _answer

        def log_message(self, *_: Any) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    container.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield container
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
