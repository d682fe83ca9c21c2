"""A bucket of S3, for tests of copies."""

from collections.abc import Iterator

import pytest
from s3_buckets import Bucket, bucket
from s3_server import moto_server


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    with moto_server() as url:
        yield url


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with bucket(moto, monkeypatch) as made:
        yield made
