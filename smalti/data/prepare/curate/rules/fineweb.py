"""FineWeb's rules (Penedo et al. 2024, arXiv 2406.17557), in two presets because paper and code differ.

Lines are those that are not blank, as in the published code. The limit on the share of characters in repeated lines is
0.01 in the published code and 0.1 in the paper.
"""

from smalti.data.prepare.curate.rules.measure import Text, frac
from smalti.data.prepare.curate.rules.rule import Preset, Rule

_ENDS = (".", "'", '"', "!", "?")
_SHORT_LINE_CHARACTERS = 30


def _punctuated_frac(text: Text) -> float:
    return frac(sum(line.endswith(_ENDS) for line in text.full_lines), len(text.full_lines))


def _short_frac(text: Text) -> float:
    return frac(sum(len(line) <= _SHORT_LINE_CHARACTERS for line in text.full_lines), len(text.full_lines))


def _repeated_characters(text: Text) -> float:
    return frac(text.repeated_lines[1], len(text.text) - text.text.count("\n"))


def _newlines(text: Text) -> float:
    return frac(text.text.count("\n"), text.tokens.tokens)


def _preset(name: str, repeated_limit: float) -> Preset:
    return Preset(
        name,
        "Penedo et al. 2024, arXiv 2406.17557, section 3.6",
        (
            Rule("punctuated-line-frac", "share of lines that end in punctuation", _punctuated_frac, low=0.12),
            Rule("short-line-frac", "share of lines of at most 30 characters", _short_frac, high=0.67),
            Rule(
                "repeated-line-characters",
                "share of characters in lines seen before",
                _repeated_characters,
                high=repeated_limit,
            ),
            Rule("newlines-per-word", "line ends for each word", _newlines, high=0.3),
        ),
    )


FINEWEB_CODE = _preset("fineweb-code-0.01", 0.01)
FINEWEB_PAPER = _preset("fineweb-paper-0.1", 0.1)
