"""C4's rules (Raffel et al. 2019, arXiv 1910.10683, section 2.2, and its published code), for English web pages.

The preset edits texts: it removes lines that are not sentences, and citation marks. The other rules are about the lines
that stay, as in the code; the paper drops a page with a curly bracket anywhere. The list of bad words is not used.
Sentences are counted by their end marks, without a trained splitter.
"""

import re

from smalti.data.prepare.curate.rules.measure import Text, count_sentences
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_MIN_WORDS_IN_LINE = 3
_MAX_WORD_CHARACTERS = 1000
_MIN_SENTENCES = 5
_TERMINAL = (".", "?", "!", '"', "'")
_CITATION = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
_PHRASES = (
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)


def _edit(text: str) -> str:
    lines = (_CITATION.sub("", line.strip()) if "[" in line else line.strip() for line in text.split("\n"))
    text = "\n".join(line for line in lines if _is_sentences(line))
    lower = text.lower()
    if any(phrase in lower for phrase in _PHRASES):
        lines = (line for line in text.split("\n") if not any(phrase in line.lower() for phrase in _PHRASES))
        text = "\n".join(lines)
    return text


def _is_sentences(line: str) -> bool:
    return (
        line.endswith(_TERMINAL)
        and not line.endswith("...")
        and len(line.split(None, _MIN_WORDS_IN_LINE - 1)) == _MIN_WORDS_IN_LINE
        and (len(line) <= _MAX_WORD_CHARACTERS or max(map(len, line.split())) <= _MAX_WORD_CHARACTERS)
    )


def _sentences(text: Text) -> float:
    return sum(map(count_sentences, text.full_lines))


C4 = Preset(
    "c4-2019",
    "Raffel et al. 2019, arXiv 1910.10683, section 2.2",
    (),
    edit=_edit,
    rules_after_edit=(
        Rule(
            "lorem-ipsum",
            "occurrences of 'lorem ipsum' in the lines that stay",
            lambda text: text.text.lower().count("lorem ipsum"),
            high=0,
        ),
        Rule("curly-brackets", "occurrences of '{' in the lines that stay", lambda text: text.text.count("{"), high=0),
        Rule("sentences", "sentences in the lines that stay", _sentences, low=_MIN_SENTENCES),
    ),
)
