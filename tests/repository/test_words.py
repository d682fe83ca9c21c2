"""The list of words that are never right is applied to texts and to names of variables."""

from pathlib import Path

import pytest
import words

ROOT = Path(__file__).resolve().parents[2]
RULES = words.read_rules(ROOT / words.LIST)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("# The planner reckons it.\n", "reckons"),
        ('raise UserError("mend the link")\n', "mend"),
        ("x = 1  # asked\n# the same in any company\n", "in any company"),
        ("found = [1]\n", "found = ..."),
        ("for told in ():\n    pass\n", "told = ..."),
    ],
)
def test_a_word_is_found_with_its_line_and_what_to_write(text: str, word: str) -> None:
    ((line, at, instead),) = words.problems(text, RULES, names=True)
    assert (at, instead != "") == (word, True)
    assert word.partition(" ")[0] in text.splitlines()[line - 1]


@pytest.mark.parametrize("text", ["print('found', amends)\n", "recommended = foundation(recommend)\n", "row.found\n"])
def test_longer_words_and_words_that_are_not_assigned_are_right(text: str) -> None:
    assert words.problems(text, RULES, names=True) == []


def test_texts_are_checked_and_release_notes_are_not(tmp_path: Path) -> None:
    for name, text in {
        words.LIST: "reckon | compute\n",
        "docs/clean.md": "We compute.\n",
        "docs/new.md": "They\nreckon so.\n",
        "CHANGELOG.md": "We did reckon.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert words.check(tmp_path) == ["docs/new.md:2: 'reckon'; write: compute"]
