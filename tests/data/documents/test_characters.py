"""Counts of characters by class against loops and regular expressions."""

import re

from hypothesis import example, given
from hypothesis import strategies as st

from smalti.data.documents.characters import SCRIPTS, count, count_scripts

RANGES = st.characters(categories=["Lu", "Ll", "Lo", "Lm", "Mn", "Mc", "Nd", "Nl", "No", "Zs", "Po", "Pc", "Cs", "So"])
TEXTS = st.text(st.one_of(RANGES, st.characters(max_codepoint=0x3FFF)), max_size=60)


@given(TEXTS)
@example("Ⅻ ² _ 5 ٣ é ß 中 か 한 \u2028\x1c \U0001f600 \ud800")
def test_counts_are_those_of_a_loop(text):
    visible = [character for character in text if not character.isspace()]
    assert count(text) == (
        sum(map(str.isalpha, text)),
        len(re.findall(r"[\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3]", text)),
        len(visible),
        sum(character.isalpha() or not character.isascii() for character in visible),
        len(re.findall(r"[^\W\d_]", text)),
    )


@given(TEXTS)
@example("".join(map(chr, range(0x250))))
def test_scripts_are_those_of_regular_expressions(text):
    assert count_scripts(text) == {
        name: len(re.findall(f"[{characters}]", text)) for name, characters in SCRIPTS.items()
    }
