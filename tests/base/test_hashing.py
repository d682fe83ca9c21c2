"""Digests: known values, and equal values give equal digests."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from smalti.base.hashing import digest_json, sha256_bytes, sha256_file, xxh3

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def test_known_values() -> None:
    assert sha256_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert xxh3(b"") == 0x2D06800538D394C2
    assert digest_json({}) == sha256_bytes(b"{}")


def test_file_is_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 9000  # more than two chunks, the last one short
    path = tmp_path / "file"
    path.write_bytes(data)
    assert sha256_file(path) == sha256_bytes(data)


def test_views_and_bytes_agree() -> None:
    assert xxh3(memoryview(b"0123456789")[2:5]) == xxh3(b"234")


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=5))
def test_order_of_keys_does_not_matter(value: dict[str, object]) -> None:
    assert digest_json(dict(reversed(value.items()))) == digest_json(value)


def test_different_values_differ() -> None:
    values = [1, "1", [1], {"1": 1}, None, True, "", [], {}, 1.5]
    assert len({digest_json(value) for value in values}) == len(values)
