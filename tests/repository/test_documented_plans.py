"""What the pages show after ``$ smalti plan ...`` is what the command prints; ``...`` stands for lines left out."""

import re
import shlex
from pathlib import Path

import pytest

from smalti.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(?:console|text)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS_FILES = re.compile(r"\.yaml\b|plan data demo|runs/|this-machine|--measure")
"""Recipes of the reader's, data, runs and measurements: the tests of those verbs have examples of their own."""


def shown() -> list[tuple[str, str, list[str]]]:
    """(page, command, lines below it) of every example."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for block in BLOCK.findall(page.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, below = part.replace("\\\n", "").partition("\n")
                if command.startswith("smalti plan") and not NEEDS_FILES.search(command):
                    found.append((str(page.relative_to(ROOT)), command, below.rstrip().splitlines()))
    return found


@pytest.mark.parametrize(("page", "command", "lines"), shown(), ids=lambda value: str(value)[:60])
def test_page_shows_what_the_command_prints(
    page: str, command: str, lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(shlex.split(command)[1:])
    captured = capsys.readouterr()
    printed = iter([line.rstrip() for line in (captured.out + captured.err).splitlines()])
    for line in lines:
        if line.strip() not in ("", "..."):
            assert line.rstrip() in printed, f"{page}: '{line}' is not printed, or not in this order"


def test_there_are_examples() -> None:
    assert len(shown()) > 5
