"""Each published threshold, from both sides; the measures against plain counting."""

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smalti.config.curate import Preset as PresetName
from smalti.data.prepare.curate.rules.measure import Text, count_sentences, repeats
from smalti.data.prepare.curate.rules.ngrams import Ngrams
from smalti.data.prepare.curate.rules.presets import PRESETS, presets_by_name
from smalti.data.prepare.curate.rules.rule import judge


def prose(n_words: int) -> str:
    """Words that break no other rule of Gopher's: varied, with stop words."""
    return " ".join(
        "the and" if i == 0 else f"word{chr(97 + i % 26)}{chr(97 + i // 26 % 26)}" for i in range(n_words - 1)
    )


def broken_by(text: str, *names: str) -> str | None:
    return judge(text, presets_by_name(names)).rule


def test_names_are_those_of_the_config():
    assert set(PRESETS) == set(get_args(PresetName))


def test_thresholds_are_the_published_ones():
    limits = {
        f"{name}/{rule.name}": (rule.low, rule.high)
        for name, preset in PRESETS.items()
        for rule in (*preset.rules, *preset.rules_after_edit)
    }
    inf = float("inf")
    published = {
        "refinedweb-2023/removed-word-frac": (-inf, 0.05),
        "gopher-2021/words": (50, 100_000), "gopher-2021/mean-word-length": (3, 10),
        "gopher-2021/hash-frac": (-inf, 0.1), "gopher-2021/ellipsis-frac": (-inf, 0.1),
        "gopher-2021/bullet-line-frac": (-inf, 0.9), "gopher-2021/ellipsis-line-frac": (-inf, 0.3),
        "gopher-2021/alphabetic-word-frac": (0.8, inf), "gopher-2021/stop-words": (2, inf),
        "gopher-repetition-2021/repeated-line-frac": (-inf, 0.30),
        "gopher-repetition-2021/repeated-paragraph-frac": (-inf, 0.30),
        "gopher-repetition-2021/repeated-line-characters": (-inf, 0.20),
        "gopher-repetition-2021/repeated-paragraph-characters": (-inf, 0.20),
        "gopher-repetition-2021/top-2-gram": (-inf, 0.20), "gopher-repetition-2021/top-3-gram": (-inf, 0.18),
        "gopher-repetition-2021/top-4-gram": (-inf, 0.16), "gopher-repetition-2021/repeated-5-grams": (-inf, 0.15),
        "gopher-repetition-2021/repeated-6-grams": (-inf, 0.14),
        "gopher-repetition-2021/repeated-7-grams": (-inf, 0.13),
        "gopher-repetition-2021/repeated-8-grams": (-inf, 0.12),
        "gopher-repetition-2021/repeated-9-grams": (-inf, 0.11),
        "gopher-repetition-2021/repeated-10-grams": (-inf, 0.10),
        "c4-2019/lorem-ipsum": (-inf, 0), "c4-2019/curly-brackets": (-inf, 0), "c4-2019/sentences": (5, inf),
        "fineweb-code-0.01/punctuated-line-frac": (0.12, inf), "fineweb-code-0.01/short-line-frac": (-inf, 0.67),
        "fineweb-code-0.01/repeated-line-characters": (-inf, 0.01),
        "fineweb-code-0.01/newlines-per-word": (-inf, 0.3),
        "fineweb-paper-0.1/punctuated-line-frac": (0.12, inf), "fineweb-paper-0.1/short-line-frac": (-inf, 0.67),
        "fineweb-paper-0.1/repeated-line-characters": (-inf, 0.1),
        "fineweb-paper-0.1/newlines-per-word": (-inf, 0.3),
    }  # fmt: skip
    ours = {
        name: value for name, value in limits.items() if name.split("/")[0] not in ("safe", "prose-light", "code-light")
    }
    assert ours == published


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (prose(50), None),
        (prose(49), "words"),
        ("a b the to " * 20, "mean-word-length"),
        ("the to " + "incomprehensibilities " * 60, "mean-word-length"),
        (prose(100) + " #" * 10, None),
        (prose(100) + " #" * 11, "hash-frac"),
        (prose(100) + " …" * 11, "ellipsis-frac"),
        ("\n".join("- " + prose(6) for _ in range(10)), "bullet-line-frac"),
        ("\n".join(["- " + prose(6)] * 9 + [prose(6)]), None),
        ("\n".join([prose(12) + "..."] * 4 + [prose(12)] * 6), "ellipsis-line-frac"),
        ("\n".join([prose(12) + "..."] * 3 + [prose(12)] * 7), None),
        (prose(80) + " 1234" * 20, None),
        (prose(80) + " 1234" * 21, "alphabetic-word-frac"),
        (prose(60).replace("the and", "some more"), "stop-words"),
        (prose(60).replace("the and", "the the"), "stop-words"),
        (prose(60).replace("the and", "The BE"), None),
    ],
)
def test_gopher_quality(text, rule):
    assert broken_by(text, "gopher-2021") == (rule and f"gopher-2021/{rule}")


def test_gopher_repetition():
    name = "gopher-repetition-2021"
    assert broken_by(prose(300), name) is None
    lines = [prose(200)[i * 40 : i * 40 + 40] for i in range(10)]
    assert broken_by("\n".join(lines), name) is None
    assert broken_by("\n".join([*lines[:6], *["same short line"] * 5]), name) == f"{name}/repeated-line-frac"
    long = prose(60)
    assert broken_by("\n".join([*lines[:8], long, long]), name) == f"{name}/repeated-line-characters"
    paragraphs = "\n\n".join([*lines[:6], *["para\ngraph"] * 5])
    assert broken_by(paragraphs, name) == f"{name}/repeated-line-frac"
    assert broken_by("buy now " * 40 + prose(50), name) == f"{name}/top-2-gram"
    sentence = " ".join(f"s{i}tuvw" for i in range(30))
    assert broken_by(f"{prose(40)} {sentence} {prose(12)[8:]} {sentence}", name) == f"{name}/repeated-5-grams"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("One two three. Four five six! Seven eight nine? Ten is here. Eleven is there.", None),
        ("One two three. Four five six! Seven eight nine? Ten is here.", "sentences"),
        ("A fine line of text here.\n" * 5, None),
        ("A fine line of text here\n" * 5, "sentences"),
        ("A fine line of text here...\n" * 5, "sentences"),
        ("Two words.\n" * 5, "sentences"),
        ("This needs JavaScript to run.\n" * 5, "sentences"),
        ("Please read our privacy policy here.\n" * 5, "sentences"),
        ("A line with " + "x" * 1001 + " in it.\n" * 5, "sentences"),
        ("A fine line of text here.\n" * 5 + "Lorem ipsum dolor sit.", "lorem-ipsum"),
        ("A fine line of text here.\n" * 5 + "With a { in it.", "curly-brackets"),
        ("A fine line of text here.\n" * 5 + "{", None),
    ],
)
def test_c4(text, rule):
    assert broken_by(text, "c4-2019") == (rule and f"c4-2019/{rule}")


def test_c4_takes_lines_and_citations_out():
    text = "Menu\n" + "A fine line [12] of text[edit] here.\n" * 5 + "Share"
    assert judge(text, presets_by_name(["c4-2019"])).text == "\n".join(["A fine line  of text here."] * 5)


BODY = "\n".join(f"This is a line of some length number {chr(97 + i)}." for i in range(20))


@pytest.mark.parametrize(
    ("line", "left"),
    [
        *((line, None) for line in ("Share", "CLICK HERE NOW to go", "2024", "12K likes", " 3,400 Views ", "Sign-in")),
        ("Sign-in to see this", "to see this"), ("the story Read more...", "the story"), ("Read more...", None),
        ("you have 3 items in cart today", "you have 3 today"), ("items in cart", None), ("Sign-in Read more...", None),
        *((line, line) for line in ("12 345.6 -- 7", "3 like", "ABC def", "Read more now", "12K likes of it", "- -")),
        *((line, line) for line in (f"{'word ' * 9}read more...", f"sign-in {'word ' * 9}is", "to Sign-in")),
    ],
)  # fmt: skip
def test_refinedweb_edits_lines_as_its_code(line, left):
    kept = [BODY[:400], *([] if left is None else [left]), "", BODY[400:]]
    verdict = judge("\n".join([BODY[:400], line, "", BODY[400:]]), presets_by_name(["refinedweb-2023"]))
    assert (verdict.rule, verdict.text) == (None, "\n".join(kept))


def test_refinedweb_drops_what_loses_more_than_a_twentieth_of_its_words():
    words = f"{prose(95)}\n"
    assert broken_by(words + "more\n" * 5, "refinedweb-2023") is None
    assert broken_by(words + "more\n" * 6, "refinedweb-2023") == "refinedweb-2023/removed-word-frac"
    assert broken_by(words + "--\n" * 50, "refinedweb-2023") is None  # no words


def test_fineweb_presets_differ_only_in_repeated_lines():
    body = [f"This is a line of some length number {chr(97 + i)}." for i in range(20)]
    assert broken_by("\n".join(body), "fineweb-code-0.01") is None
    once_more = "\n".join([*body, body[0]])  # 1 of 21 lines repeated: 4.8 % of the characters
    assert broken_by(once_more, "fineweb-code-0.01") == "fineweb-code-0.01/repeated-line-characters"
    assert broken_by(once_more, "fineweb-paper-0.1") is None
    unmarked = [line.rstrip(".") for line in body]
    assert broken_by("\n".join(unmarked), "fineweb-paper-0.1") == "fineweb-paper-0.1/punctuated-line-frac"
    short = [*body[:6], *(f"item {i} is ok." for i in range(14))]
    assert broken_by("\n".join(short), "fineweb-paper-0.1") == "fineweb-paper-0.1/short-line-frac"
    listed = "\n".join(f"Averyveryveryverylongwordindeed{i}." for i in range(20))
    assert broken_by(listed, "fineweb-paper-0.1") == "fineweb-paper-0.1/newlines-per-word"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("Return the number of items that the queue holds at present.", None),
        ("Return the value.", "words"),
        ("1 2 3 4 5 6 7 8 9 10 11 12 13", "mean-word-length"),
        ("100 200 300 400 500 600 700 800 abc def ghi", "alphabetic-word-frac"),
        ("An example line of text\n" * 4, "repeated-line-characters"),
    ],
)
def test_prose_light(text, rule):
    assert broken_by(text, "prose-light") == (rule and f"prose-light/{rule}")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("import os\n\ndef f(x):\n    return os.path.join(x, 'y')", None),
        ("import os", "lines"),
        ("\n".join(f"x{c} = {c * 120!r}" for c in "abc"), "mean-line-length"),
        ("\n".join([*(f"{c} = {c}()" for c in "abcdefghijklmnopqrstuvwxyz"), "d" * 1001]), "longest-line"),
        ("(){}[]<>+-*/\n=====%%%%%%\n$$$;;;:::", "alphanumeric-frac"),
        ("\n".join(f"0x{i:02x}: 0x{i + 128:04x}," for i in range(100)), "digit-frac"),
        ("    return NotImplemented\n" * 9, "repeated-line-characters"),
    ],
)
def test_code_light(text, rule):
    assert broken_by(text, "code-light") == (rule and f"code-light/{rule}")


def test_reason_names_score_and_limit():
    verdict = judge("Return the value.", presets_by_name(["prose-light"]))
    assert verdict.score == 3
    assert verdict.reason == "words: 3 is below 10"


def test_first_broken_rule_decides_and_none_keeps_all():
    assert broken_by("x", "prose-light", "gopher-2021") == "prose-light/words"
    assert broken_by(prose(20), "prose-light", "gopher-2021") == "gopher-2021/words"
    assert broken_by("x", "none") is None


WORDS = st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), max_size=30)


@pytest.mark.proof
@given(WORDS, st.integers(1, 12))
def test_ngram_measures_against_plain_counting(words, n):
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    counts = Counter(grams)
    best = max(counts.values(), default=0)
    first = next((len(" ".join(gram)) for gram, count in counts.items() if count == best), 0)
    ngrams = Ngrams(words)
    assert ngrams.top_characters(n) == best * first
    seen, inside, start = set(), 0, 0
    while start < len(grams):
        is_repeated = grams[start] in seen
        inside += len(" ".join(grams[start])) if is_repeated else 0
        seen.add(grams[start])
        start += n if is_repeated else 1
    assert ngrams.repeated_characters(n) == inside


@given(st.lists(st.sampled_from(["x", "yy", ""]), max_size=20))
def test_repeats_against_plain_counting(items):
    again = [item for i, item in enumerate(items) if item in items[:i]]
    assert repeats(items) == (len(again), sum(map(len, again)))


@given(st.text())
def test_every_rule_has_a_finite_score_for_every_text(text):
    for preset in PRESETS.values():
        for rule in (*preset.rules, *preset.rules_after_edit):
            score = rule.score(Text(text))
            assert score == score
            assert abs(score) < float("inf")


def test_sentences():
    assert [count_sentences(line) for line in ("No end", "One.", 'He said "go!" Then left.', "v1.2.3 is out.")] == [
        1,
        1,
        2,
        1,
    ]


def test_the_reference_page_agrees_with_the_code():
    page = (Path(__file__).resolve().parents[3] / "docs" / "reference" / "quality-rules.md").read_text()
    sections = dict(part.split("`\n", 1) for part in page.split("\n## `")[1:])
    assert list(sections) == list(PRESETS)
    for name, preset in PRESETS.items():
        told = [
            [cell.strip(" `") for cell in line.split("|")[1:-1]]
            for line in sections[name].splitlines()
            if "| `" in line
        ]
        rules = [] if name == "none" else [*preset.rules, *preset.rules_after_edit]
        assert [(row[0], row[1]) for row in told[: len(rules)]] == [(rule.name, rule.what) for rule in rules]
        for row, rule in zip(told, rules, strict=False):
            limits = [float(cell.replace(",", "")) if cell else None for cell in row[2:]]
            assert limits == [None if abs(limit) == float("inf") else limit for limit in (rule.low, rule.high)]
