"""Paths and URLs of a config: invalid ones, and those with credentials."""

import pytest

from smalti.base.errors import UserError
from smalti.config.curate import CurateConfig, TokenizeConfig
from smalti.config.data import DataConfig
from smalti.config.dedup import DedupConfig
from smalti.config.load import from_dict
from smalti.config.places import check_local, check_place
from smalti.config.schema import NotAllowed

SECRETS = (
    "s3://KEY:hush@bucket/x",
    "s3://KEY:hu/hush@bucket/x",
    "s3://hush@bucket/x",
    "https://me:hush@host/x",
    "https://me:hu/hush@host/x",
    "https://host/x?X-Amz-Signature=hush",
    "az://box/x?sig=hush",
    "s3://bucket/x?endpoint=http://me:hush@host",
    "s4://KEY:hush@bucket/x",
    "s3:/KEY:hush@bucket/x",
)


@pytest.mark.parametrize("url", SECRETS)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    for where in ("sources", "heldout"):
        data = {"sources": {"a": "x"}, "seq_len": 8, "stages": [{"weights": {"a": 1}}]}
        data[where] = {"a": url}
        with pytest.raises(UserError) as error:
            from_dict(DataConfig, data)
        assert "hush" not in str(error.value)
        assert f"{where}.a" in str(error.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/x", "did you mean s3://?"),
        ("S3://bucket/x", "did you mean s3://?"),
        ("s3:/bucket/x", "two slashes"),
        ("s3://", "names no bucket"),
        ("hf:///x", "names no repository"),
    ],
)
def test_what_is_no_url_is_answered_with_the_schemes(url: str, words: str) -> None:
    with pytest.raises(NotAllowed) as error:
        check_place(url)
    assert words in f"{error.value} {error.value.hint}"
    assert "s3://, gs://, az://" in error.value.allowed


@pytest.mark.parametrize(
    "place",
    [
        "data/a",
        "/x/a@b:c",
        "s3://bucket/a:b@c",
        "s3://bucket/x?endpoint=http://host:9000&keys=CW",
        "https://host:80/x",
        "http://[::1]:80/x",
        "hf://datasets/org/name@v1/x",
        "abfss://box@account.dfs.core.windows.net/x",
        "memory://a",
    ],
)
def test_what_is_meant_stays(place: str) -> None:
    assert check_place(place) == place


@pytest.mark.parametrize("url", ["s3://bucket/run", "gs://bucket/run", "file:///tmp/run"])
def test_folders_that_are_written_are_local(url: str) -> None:
    """So ``--dry-run`` refuses what the run would refuse."""
    with pytest.raises(NotAllowed, match="is not a local path"):
        check_local(url)
    assert check_local("runs/a:b") == "runs/a:b"
    with pytest.raises(UserError, match="is not a local path"):
        from_dict(CurateConfig, {"sources": {"a": {"path": "x"}}, "output": url})
    with pytest.raises(UserError, match="is not a local path"):
        from_dict(DedupConfig, {"documents": "x", "output": url})
    with pytest.raises(UserError, match="is not a local path"):
        from_dict(TokenizeConfig, {"documents": "x", "output": url})
