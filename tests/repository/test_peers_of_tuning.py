"""``make test-peers``: its packages are pinned at the versions that the docs name, and its tests exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "page"), [("trl", "docs/concepts/tune/losses.md"), ("peft", "docs/guides/adapters.md")]
)
def test_docs_name_the_pinned_versions(package: str, page: str) -> None:
    pins = dict(re.findall(r"(?m)^([\w-]+)==(\d+\.\d+)", (ROOT / "bench/peers/tune.txt").read_text()))
    assert re.search(rf"(?i)\b{package} {re.escape(pins[package])}\b", (ROOT / page).read_text())


def test_its_tests_exist() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("test-peers: ")[2].partition("\n\n")[0]
    files = re.findall(r"tests/\S+\.py", recipe)
    assert len(files) == 2
    assert all("importorskip" in (ROOT / file).read_text() for file in files)
