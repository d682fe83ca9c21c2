"""datatrove's quality filters, each rule by itself (run by bench/build_rules.py).

    rules_datatrove.py IN.jsonl OUT.json WORDS     for each document and rule, whether that alone drops it

``WORDS``: ``english``, its own word and sentence splitter (spaCy); or ``same``, those of Smalti's rules in their place.
"""

import json
import re
import sys
from functools import lru_cache
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
    c4_filters,
    fineweb_quality_filter,
    gopher_quality_filter,
    gopher_repetition_filter,
)

TOKEN = re.compile(r"\w+(?:['’\-]\w+)*|[^\w\s]")  # noqa: RUF001
SENTENCE_END = re.compile(r"[.!?]+[\"')\]]*(?=\s|$)")

QUALITY = (
    "min_doc_words", "max_doc_words", "min_avg_word_length", "max_avg_word_length", "max_symbol_word_ratio",
    "max_bullet_lines_ratio", "max_ellipsis_lines_ratio", "max_non_alpha_words_ratio", "min_stop_words",
)  # fmt: skip
REPETITION = ("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac", "top_n_grams",
              "dup_n_grams")  # fmt: skip


def quality(*kept: str) -> GopherQualityFilter:
    """Return the filter with only these rules."""
    return GopherQualityFilter(**{name: None for name in QUALITY if name not in kept})


def repetition(**kept: Any) -> GopherRepetitionFilter:
    """Return the filter with only these rules; True keeps its default."""
    off: dict[str, Any] = {name: () if "grams" in name else None for name in REPETITION if name not in kept}
    return GopherRepetitionFilter(**off, **{name: value for name, value in kept.items() if value is not True})


def rules() -> dict[str, Any]:
    """Return Smalti's name of a rule -> datatrove's filter with that rule alone, and the reasons that are this rule."""
    c4_off = {"filter_lorem_ipsum": False, "filter_curly_bracket": False}
    of: dict[str, Any] = {
        "gopher-2021/words": quality("min_doc_words", "max_doc_words"),
        "gopher-2021/mean-word-length": quality("min_avg_word_length", "max_avg_word_length"),
        "gopher-2021/hash-frac": (quality("max_symbol_word_ratio"), "gopher_too_many_hashes", "…"),
        "gopher-2021/ellipsis-frac": (quality("max_symbol_word_ratio"), "gopher_too_many_ellipsis", "#"),
        "gopher-2021/bullet-line-frac": quality("max_bullet_lines_ratio"),
        "gopher-2021/ellipsis-line-frac": quality("max_ellipsis_lines_ratio"),
        "gopher-2021/alphabetic-word-frac": quality("max_non_alpha_words_ratio"),
        "gopher-2021/stop-words": quality("min_stop_words"),
        "gopher-repetition-2021/repeated-line-frac": repetition(dup_line_frac=True),
        "gopher-repetition-2021/repeated-paragraph-frac": repetition(dup_para_frac=True),
        "gopher-repetition-2021/repeated-line-characters": repetition(dup_line_char_frac=True),
        "gopher-repetition-2021/repeated-paragraph-characters": repetition(dup_para_char_frac=True),
        "c4-2019/lorem-ipsum": C4QualityFilter(min_num_sentences=-1, filter_curly_bracket=False),
        "c4-2019/curly-brackets": C4QualityFilter(min_num_sentences=-1, filter_lorem_ipsum=False),
        "c4-2019/sentences": C4QualityFilter(**c4_off),
        "fineweb-code-0.01/punctuated-line-frac": (FineWebQualityFilter(), "line_punct_ratio", None),
        "fineweb-code-0.01/short-line-frac": (FineWebQualityFilter(line_punct_thr=-1), "short_line_ratio", None),
        "fineweb-code-0.01/repeated-line-characters": (
            FineWebQualityFilter(line_punct_thr=-1, short_line_thr=9), "char_dup_ratio", None),
        "fineweb-code-0.01/newlines-per-word": (
            FineWebQualityFilter(line_punct_thr=-1, short_line_thr=9, char_duplicates_ratio=9), "list_ratio", None),
    }  # fmt: skip
    for n, limit in ((2, 0.2), (3, 0.18), (4, 0.16)):
        of[f"gopher-repetition-2021/top-{n}-gram"] = repetition(top_n_grams=((n, limit),))
    for n, limit in ((5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.10)):
        of[f"gopher-repetition-2021/repeated-{n}-grams"] = repetition(dup_n_grams=((n, limit),))
    return {name: value if isinstance(value, tuple) else (value, None, None) for name, value in of.items()}


def remember_words() -> None:
    """Split each text once, and not again for each rule."""
    for module, name in (
        (gopher_quality_filter, "split_into_words"),
        (gopher_repetition_filter, "split_into_words"),
        (fineweb_quality_filter, "split_into_words"),
        (c4_filters, "split_into_sentences"),
    ):
        setattr(module, name, lru_cache(maxsize=5000)(getattr(module, name)))


def decision(text: str, rule: Any, reason: str | None, without: str | None) -> bool | None:
    """Return whether a rule drops a text; None where datatrove raises an exception (an empty text)."""
    try:
        outcome = rule.filter(Document(text if without is None else text.replace(without, " "), "0"))
    except (ZeroDivisionError, AssertionError):
        return None
    if outcome is True:
        return False
    return reason is None or outcome[1] == reason


def use_same_words() -> None:
    """Split words and sentences as Smalti's rules do."""
    gopher_quality_filter.split_into_words = lambda text, language: TOKEN.findall(text)
    fineweb_quality_filter.split_into_words = lambda text, language: TOKEN.findall(text)
    gopher_repetition_filter.split_into_words = lambda text, language: text.split()
    c4_filters.split_into_sentences = lambda text, language: max(1, len(SENTENCE_END.findall(text))) * [""]


def main() -> None:
    """Read documents, write the result."""
    source, to, words = sys.argv[1:]
    with open(source) as file:
        texts = [json.loads(line)["text"] for line in file]
    if words == "same":
        use_same_words()
    remember_words()
    every = rules()
    result: dict[str, list[bool | None]] = {name: [] for name in every}
    for text in texts:
        for name, rule in every.items():
            result[name].append(decision(text, *rule))
    with open(to, "w") as file:
        json.dump(result, file)


if __name__ == "__main__":
    main()
