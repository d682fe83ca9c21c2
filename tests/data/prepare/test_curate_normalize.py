"""The normal form is idempotent and changes only what is documented."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.data.prepare.curate.normalize import normalize

AWKWARD = st.text(
    alphabet=st.sampled_from(list("ae \t\n\r\x00\x07\x0c\x7f\x85\x9f\ufeff\u0301\u0308\u00e9\u212bﬁ가ᄀ\u1161"))
)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("a\r\nb\rc", "a\nb\nc"),
        ("a  \nb\t\n\n", "a\nb"),
        ("\n \n    x = 1\n", "    x = 1"),
        ("e\u0301", "é"),
        ("\ufeffa\x00b\x1bc", "abc"),
        ("page\x0c\nnext", "page\nnext"),
        ("e\x00\u0301", "é"),
        ("\ttab stays\tinside", "\ttab stays\tinside"),
        (" \n\t\n", ""),
    ],
)
def test_examples(raw, expected):
    assert normalize(raw) == expected


@pytest.mark.proof
@given(st.one_of(st.text(), AWKWARD))
def test_idempotent_and_clean(text):
    done = normalize(text)
    assert normalize(done) == done
    assert unicodedata.is_normalized("NFC", done)
    assert not any(unicodedata.category(c) == "Cc" and c not in "\n\t" for c in done)
    assert not any(line != line.rstrip(" \t") for line in done.split("\n"))
    assert not done.startswith("\n")
    assert not done.endswith("\n")


@given(st.text(alphabet="abcXYZ 09_.,(){}äß漢", min_size=1))
def test_plain_lines_keep_every_character(text):
    line = "x" + text + "x"
    assert normalize(line) == unicodedata.normalize("NFC", line)
