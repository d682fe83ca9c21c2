"""Cleaning against its patterns without the searches that come before them."""
# ruff: noqa: RUF001  (letters of other alphabets are meant)

import re

from hypothesis import example, given
from hypothesis import strategies as st

from smalti.data.build.clean import credentials, markup
from smalti.data.build.clean.language import _words

WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
PIECES = [
    "d'un", "l’homme", "don't've", "'tis", "rock'n'roll", "’", "'", "It", "is", "ÉTÉ", "İ", "Straße", "и", "5", "_",
    "a1b", " ", " ", "\n", "-", ".", "中", "\ud800",
]  # fmt: skip
HARD = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=30).map("".join)

LINES = [
    "", "A line of prose, with a comma.", "We use cookies to serve you", "COOKIE POLICY", "privacy  policy",
    "All rights reserved", "Sign in", "log in ", "Read more...", "read more…", "Share this page", "share",
    "Follow us on x", "Advertisement", "3 items in cart", "Please enable your Javascript", "var x = 5;",
    "window.alert(1);", "gtag('x')",
    ".a, .b { color: red }", "color: red;", "Terms and conditions apply", "a; b", "x" * 240 + " sign in",
    "}function f() {", "```", "Terms", "log", "Skip to main content", "ſhare",
]  # fmt: skip

SECRETS = [
    "AKIAIOSFODNN7EXAMPLQ", "xoxb-1234567890", "ghp_" + "aB3" * 12, "key", "api_key=", "token: ", "Secret ",
    "password is ",
    "aB3dE5gH7jK9mN1pQ3sT", "Zx9Kq2Lm8Vb4Tr7Wp1Yc6Nd3", "abcdefghijklmnopqrstuvwxyz", "1234567890123456", "https://",
    " ",
    " ", "\n", "x", "commit ", "=", '"', "/", "settings.SECRET_KEY_2", "A" * 14, "-", "eyJ",
]  # fmt: skip


@given(HARD)
@example("it's rock'n'roll’n 'tis d’un")
def test_words_of_languages_are_those_of_the_pattern(text):
    plain = [word.lower().replace("’", "'") for word in WORD.findall(text)]
    assert [word.replace("ς", "σ") for word in _words(text)] == [word.replace("ς", "σ") for word in plain]


@given(st.lists(st.sampled_from(LINES), max_size=12))
def test_lines_of_boilerplate_are_those_of_the_patterns(chosen):
    lines = "\n".join(chosen).split("\n")
    is_code = [len(line) < 250 and bool(markup._CODE_LINE.match(line)) for line in lines]
    drops = sum(is_code) >= 2 and not markup._FENCE.search("\n".join(lines)) and sum(is_code) * 4 < len(lines) * 3
    kept = [
        line
        for line, code in zip(lines, is_code, strict=True)
        if not (code and drops) and not (len(line) < 250 and line != "ſhare" and markup._BOILERPLATE.search(line))
    ]
    plain = "\n".join(lines)
    if len(kept) < len(lines):
        plain = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")
    assert markup._without_boilerplate("\n".join(lines)) == plain


@given(st.lists(st.sampled_from(SECRETS), max_size=25).map("".join))
def test_credentials_are_those_of_the_patterns(text):
    spans = set(credentials.find_credentials(text))
    assert {match.span() for match in credentials._TOKENS.finditer(text)} <= spans
    for match in credentials._NAMED.finditer(text):
        value = match["value"].rstrip(".")
        kinds = sum(bool(re.search(kind, value)) for kind in ("[a-z]", "[A-Z]", r"\d", r"[^A-Za-z0-9]"))
        is_secret = credentials.entropy(value) >= 3.5 and kinds >= 2 and re.search(r"\d", value) is not None
        if is_secret and not credentials._ATTRIBUTE.fullmatch(value):
            assert (match.start("value"), match.start("value") + len(value)) in spans
    long_words = [match for word in re.finditer(r"\S{24,}", text) for match in [word]]
    assert [match.span() for match in credentials._unknown(text, text.split())] == [
        match.span() for word in long_words for match in credentials._UNKNOWN.finditer(text, word.start(), word.end())
    ]
