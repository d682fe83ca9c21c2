"""RefinedWeb's line-wise corrections (Penedo et al. 2023, arXiv 2306.01116, section G.2), for English web pages.

Patterns, limits and order are those of the published code of DCLM-Baseline (Li et al. 2024). The preset edits texts:
it removes lines of navigation and counters, and calls to action from short lines; a document that loses more than a
twentieth of its words is dropped.
"""

import re

from smalti.data.prepare.curate.rules.measure import Text, frac
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_MAX_UPPERCASE = 0.5
_MIN_WORDS = 2
_SHORT_WORDS = 10
_COUNTER = re.compile(
    r"^\W*\d(?:,|\.|\d)*[kmb]?\s+(?:likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|"
    r"views|followers)\W*$"
)
_CALLS = (
    re.compile(r"\s?items in cart", re.IGNORECASE),
    re.compile(r"\s?read more\.\.\.$", re.IGNORECASE),
    re.compile(r"^sign-in\s?", re.IGNORECASE),
)
_CUES = ("items in cart", "read more...", "sign-in")
"""Of which one is in every call to action."""


def _edit(text: str) -> str:
    lines = [line for line in text.split("\n") if not line or not _is_noise(line)]
    text = "\n".join(lines)
    lower = text.lower()
    if any(cue in lower for cue in _CUES):
        edited = [(line, _without_calls(line)) for line in lines]
        text = "\n".join(after for before, after in edited if not before or after.strip())
    return text.strip()


def _is_noise(line: str) -> bool:
    return (
        len(line.split(None, 1)) < _MIN_WORDS
        or sum(map(str.isupper, line)) > _MAX_UPPERCASE * len(line)
        or line.isdigit()
        or _COUNTER.search(line.lower()) is not None
    )


def _without_calls(line: str) -> str:
    for call in _CALLS:
        if len(line.split()) <= _SHORT_WORDS:
            line = call.sub("", line)
    return line


def _removed_frac(text: Text) -> float:
    n_words = _n_words(text.text)
    return frac(n_words - _n_words(_edit(text.text)), n_words)


def _n_words(text: str) -> int:
    return sum(word[0].isalnum() for word in text.split())


REFINEDWEB = Preset(
    "refinedweb-2023",
    "Penedo et al. 2023, arXiv 2306.01116, G.2; Li et al. 2024, arXiv 2406.11794 (code)",
    (Rule("removed-word-frac", "share of words that are removed", _removed_frac, high=0.05),),
    edit=_edit,
)
