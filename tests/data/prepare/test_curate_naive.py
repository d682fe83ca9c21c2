"""Fast measures against the plain form that they replace, on texts made of what is hard for them."""
# ruff: noqa: RUF001  (letters of other alphabets are meant)

import re

from hypothesis import example, given
from hypothesis import strategies as st

from smalti.data.prepare.curate.normalize import normalize
from smalti.data.prepare.curate.rules.measure import Text
from smalti.data.prepare.curate.rules.presets import PRESETS
from smalti.data.prepare.curate.rules.tokens import count_tokens

TOKEN = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")
STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
TERMINAL = (".", "?", "!", '"', "'")
POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")

PIECES = [
    "the", "The", "THE", "tHe", "be", "because", "with", "wİth", "İthe", "of", "_of", "of_", "and", "that", "have", "x",
    "don't", "’tis", "a--the", "x-the", "the-x", "-", "'", "’", "--", "_", "5", "٣", "²", "Ⅷ", "é", "e\u0301", "中",
    "ſ", "\u212a", "\ud800", "…", "...", "#", "•", "{", "[12]", "[edit]", "[citation needed]", "[]", ".", "!", '"', "?",
    " ", " ", "\t", "\xa0", "\u2028", "\n", "\n\n", "x" * 999, "JavaScript", "javascript", "use", "uses", "cookies",
    "privacy", "Policy", "terms", "lorem", "ipsum",
]  # fmt: skip
HARD = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=40).map("".join)


def tokens(text: str) -> tuple[int, int, int, int]:
    found = TOKEN.findall(text)
    words = [token for token in found if token[0].isalnum() or token[0] == "_"]
    return len(found), len(words), sum(map(len, words)), sum(any(map(str.isalpha, word)) for word in words)


@given(HARD)
@example("")
@example("'")
@example("a'")
@example("-a-b-")
@example("a'-b a-'b it's-a")
def test_tokens_are_those_of_the_pattern(text):
    assert count_tokens(text) == tokens(text)


@given(HARD)
def test_stop_words_are_tokens(text):
    rule = next(rule for rule in PRESETS["gopher-2021"].rules if rule.name == "stop-words")
    assert rule.score(Text(text)) == len(STOP_WORDS.intersection(map(str.lower, TOKEN.findall(text))))


def c4_line(line: str) -> bool:
    words, lower = line.split(), line.lower()
    return (
        line.endswith(TERMINAL)
        and not line.endswith("...")
        and len(words) >= 3
        and max(map(len, words)) <= 1000
        and "javascript" not in lower
        and not any(phrase in lower for phrase in POLICY)
    )


@given(st.lists(st.one_of(HARD, st.lists(st.sampled_from(PIECES), max_size=8).map(" ".join)), max_size=6))
@example(["We use [1] cookies here.", "use[2] cookies to go.", "A line of it.", "x " * 2 + "y" * 1001 + " z."])
def test_c4_keeps_the_same_lines(lines):
    text = "\n".join(lines)
    citation = re.compile(r"\[\d*\]|\[edit\]|\[citation needed\]")
    plain = [citation.sub("", line.strip()) for line in text.split("\n")]
    edit = PRESETS["c4-2019"].edit
    assert edit is not None
    assert edit(text) == "\n".join(filter(c4_line, plain))


@given(HARD)
@example("a \n b\t\n\tc ")
def test_trailing_blanks_go(text):
    clean = normalize(text)
    assert clean == re.sub(r"[ \t]+$", "", clean, flags=re.MULTILINE).strip("\n")
