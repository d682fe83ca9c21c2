"""RefinedWeb's line-wise corrections (Penedo et al. 2023, arXiv 2306.01116, section G.2), for English web pages.

Limits and counters are those of the published DCLM baseline, whose patterns for lines of numbers and for counters this
preset extends by marks, and by counters in the singular or without a blank. The preset edits texts: it removes lines of
navigation, counters and calls to action; a document of which they are more than a twentieth of the words is dropped.
"""

import re

from smalti.data.prepare.curate.rules.measure import Text, frac
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_MAX_UPPERCASE = 0.5
_SHORT_WORDS = 10
_COUNTER = re.compile(
    r"\W*\d[\d.,]*\s*[KkMmBb]?\s*(?:likes?|shares?|comments?|retweets?|reposts?|quotes?|bookmarks?|upvotes?|downvotes?|"
    r"downloads?|views?|followers?)\W*",
    re.IGNORECASE,
)
_CALL = re.compile(r"^\s*sign-in\b|\bread more\.\.\.\s*$|\bitems in cart\b", re.IGNORECASE)
_NUMERIC = re.compile(r"[\d\W_]+")


def _edit(text: str) -> str:
    return "\n".join(line for line in text.split("\n") if not line.strip() or not _is_noise(line))


def _is_noise(line: str) -> bool:
    words = line.split()
    return (
        len(words) < 2
        or sum(map(str.isupper, line)) > _MAX_UPPERCASE * len(line)
        or _NUMERIC.fullmatch(line) is not None
        or _COUNTER.fullmatch(line) is not None
        or (len(words) <= _SHORT_WORDS and _CALL.search(line) is not None)
    )


def _removed_frac(text: Text) -> float:
    return frac(sum(len(line.split()) for line in text.full_lines if _is_noise(line)), len(text.words))


REFINEDWEB = Preset(
    "refinedweb-2023",
    "Penedo et al. 2023, arXiv 2306.01116, G.2; Li et al. 2024, arXiv 2406.11794 (code)",
    (Rule("removed-word-frac", "share of words in the lines that are removed", _removed_frac, high=0.05),),
    edit=_edit,
)
