"""A bucket of an S3 server behind a proxy with faults, and the environment of its clients."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from s3_server import Faults, Proxy, fault_proxy, s3_environment

_numbers = itertools.count()

BOTH_SERVERS = pytest.mark.parametrize("s3", ["moto", pytest.param("seaweedfs", marks=pytest.mark.slow)], indirect=True)
"""Mark of a test: with a bucket of each server."""


@dataclass
class Bucket:
    """An empty bucket of a server; ``direct`` is a boto3 client that no fault reaches."""

    server: str
    """``moto`` or ``seaweedfs``."""
    name: str
    proxy: Proxy
    direct: Any

    @property
    def url(self) -> str:
        """URL of a folder in it."""
        return f"s3://{self.name}/runs/a"

    def objects(self) -> dict[str, int]:
        """Key -> size of everything in it."""
        pages = self.direct.get_paginator("list_objects_v2").paginate(Bucket=self.name)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}

    def unfinished_uploads(self) -> int:
        """Number of multipart uploads that were begun and not ended."""
        return len(self.direct.list_multipart_uploads(Bucket=self.name).get("Uploads", []))

    def read(self, key: str) -> bytes:
        """Content of an object."""
        return bytes(self.direct.get_object(Bucket=self.name, Key=key)["Body"].read())

    def write(self, key: str, data: bytes) -> None:
        """Replace an object."""
        self.direct.put_object(Bucket=self.name, Key=key, Body=data)


@contextmanager
def bucket(url: str, monkeypatch: pytest.MonkeyPatch, server: str = "moto") -> Iterator[Bucket]:
    """A new bucket of a server, whose proxy is the endpoint in the environment."""
    import boto3

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="test", aws_secret_access_key="test"
    )
    name = f"bucket-{next(_numbers)}"
    client.create_bucket(Bucket=name)
    with fault_proxy(url, Faults(only_get=False)) as proxy:
        for variable, value in s3_environment(proxy.url).items():
            monkeypatch.setenv(variable, value)
        yield Bucket(server, name, proxy, client)
    client.close()
