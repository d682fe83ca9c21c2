"""Markup and boilerplate go, text stays: pages, remains of pages in text, Markdown, encodings."""
# ruff: noqa: RUF001  (letters of other alphabets are meant)

import pytest

from smalti.data.build.clean.markup import clean_text
from smalti.data.build.extract.encoding import UnknownEncoding, decode
from smalti.data.build.extract.html import html_text, without_tags
from smalti.data.prepare.curate.rules.rule import judge
from smalti.data.prepare.curate.rules.safe import SAFE

PROSE = "The old mill stands beside the river, and nobody in the village remembers who built it."
JAPANESE = "古い水車小屋は川のそばに立っていて、誰がそれを建てたのか村の誰も覚えていません。"
PAGE = (
    "<!doctype html><html><head><title>T</title><style>p { color: red }</style><script>var tracker = 'x < y';</script>"
    f"</head><body><nav><a href='/'>Home</a></nav><div><h1>Mills</h1><p>{PROSE}<br>Second &amp; last.</p></div>"
    "<footer>Imprint</footer></body></html>"
)


def test_a_page_without_tags():
    assert without_tags(PAGE) == f"Mills\n\n{PROSE}\nSecond & last."


def test_a_short_page_by_either_method_has_the_text_only():
    pytest.importorskip("trafilatura")
    for method in ("tags", "trafilatura"):
        text = html_text(PAGE, method)
        assert PROSE in text
        assert "tracker" not in text
        assert "Home" not in text


@pytest.mark.parametrize(
    "page", ["<div>" * 50_000 + PROSE, "<script>" + PROSE, "<" * 1000, "<!--" + PROSE, "<a b='" * 99]
)
def test_hostile_pages_do_not_raise(page):
    html_text(page, "tags")


def test_a_page_in_a_text_field_is_read_as_a_page():
    text = clean_text(PAGE)
    assert PROSE in text
    assert "tracker" not in text
    assert "<" not in text


def test_remains_of_a_page_are_removed():
    text = (
        f"<div class='x'>{PROSE}</div>\n<script>alert(1)</script>\nvar a = 1;\nwindow.b = function() {{}};\n{PROSE}\n"
    )
    text += "Please enable JavaScript to continue.\nAccept all cookies\nShare on Facebook\n" + PROSE
    assert clean_text(text).split() == f"{PROSE} {PROSE} {PROSE}".split()


@pytest.mark.parametrize(
    "line", ["# " + "word " * 45, "." + "a" * 240, "#a" + " b, .c > d" * 20 + "!", "  " * 60 + "}"]
)
def test_a_line_that_is_nearly_code_takes_no_time(line):
    text = "\n".join([line] * 100)
    assert clean_text(text) == text


def test_rules_of_a_style_sheet_are_removed():
    rules = ".menu { color: red }\n#top .item > a, .menu-b { margin: 0 }\n.open {\n"
    assert clean_text(f"{PROSE}\n{rules}{PROSE}\n{PROSE}") == "\n".join([PROSE] * 3)


def test_markdown_keeps_its_code():
    text = f"# Title\n\n{PROSE}\n\n```html\n<div>kept</div>\nvar x = 1;\n```\n\nif a < b and c > d\n"
    assert clean_text(text) == text


@pytest.mark.parametrize(
    "text", [PROSE, "古い水車小屋は川のそばに立っていて、誰がそれを建てたのか村の誰も覚えていません。"]
)
def test_prose_passes_the_safe_rules_in_any_language(text):
    assert judge(clean_text(text), [SAFE]).rule is None


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("buy cheap pills now " * 40, "safe/repetitive-frac"),
        (PROSE + " " + "今すぐ安い薬を買う" * 40, "safe/repetitive-frac"),
        ("Home | About", "safe/letters"),
        (
            "17 | 12.5 | 99.1 | 4 | 7 | 17 | 12.5 | 98.1 | a b c d e f g h i j k l m n o p q r s t",
            "safe/letter-frac",
        ),
        ("function f(a) {\n  return a;\n}\nconst b = f(1);\nlet c = {};\n", "safe/markup-frac"),
    ],
)
def test_what_the_safe_rules_drop(text, rule):
    assert judge(text, [SAFE]).rule == rule


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "Le vieux moulin se trouve au bord de la rivière, et personne ne sait qui l'a créé à l'époque."),
        ("cp1251", "Старая мельница стоит у реки, и никто в деревне не помнит, кто её построил."),
        ("koi8-r", "Старая мельница стоит у реки, и никто в деревне не помнит, кто её построил."),
        ("shift_jis", JAPANESE * 2),
        ("euc_jp", JAPANESE * 2),
        ("utf-16", "Hello world"),
        ("utf-8-sig", "Grüße"),
    ],
)
def test_encodings_are_detected(encoding, text):
    assert decode(text.encode(encoding))[0] == text


def test_a_declared_encoding_counts_and_a_given_one_decides():
    page = '<meta charset="iso-8859-15"><p>Käse für 5 €</p>'
    assert decode(page.encode("iso-8859-15"), is_html=True)[0] == page
    with pytest.raises(UnknownEncoding, match="not ascii"):
        decode("ä".encode(), "ascii")
    with pytest.raises(UnknownEncoding, match="not nonsense"):
        decode(b"a", "nonsense")


def test_binary_data_is_no_text():
    with pytest.raises(UnknownEncoding):
        decode(bytes(range(256)) * 10)
