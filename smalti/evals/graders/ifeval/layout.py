"""Verifiers of the length and layout of a response: words, sentences, paragraphs, sections, lists, JSON, repetition.

Each takes the response, which is not blank, and the instruction's kwargs; its docstring says where the official and
the fixed verdict differ.
"""

import json
import re
from typing import NoReturn

from smalti.evals.graders.ifeval.segments import (
    bare,
    official_sentence_count,
    paragraphs,
    sentence_count,
    word_count,
)
from smalti.evals.graders.ifeval.verdict import Verdict, meets

_OPTIONS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_DECORATION = r"[ \t>#*_\"“]*"


def number_words(response: str, *, num_words: int, relation: str) -> Verdict:
    r"""At least, or less than, ``num_words`` words.

    Official: runs of ``\w``, so "don't" and "well-known" are two words each, and vowel signs cut the words of Indic
    scripts (no more with nltk 3.10). Fixed: words are what white space separates, if it has a letter or a digit.
    """
    official = meets(len(re.findall(r"\w+", response)), relation, num_words)
    return Verdict(official, meets(word_count(response), relation, num_words))


def number_sentences(response: str, *, num_sentences: int, relation: str) -> Verdict:
    """At least, or less than, ``num_sentences`` sentences.

    Official: those of nltk's punkt, approximately: the number of a list item, or the end of ``**Bold.**`` where
    nothing follows, is one too. Fixed: these and headings are none, and the end marks of other scripts count.
    """
    official = meets(official_sentence_count(response), relation, num_sentences)
    return Verdict(official, meets(sentence_count(response), relation, num_sentences))


def number_paragraphs(response: str, *, num_paragraphs: int) -> Verdict:
    """Exactly ``num_paragraphs`` paragraphs, separated by the markdown divider ``***``.

    Official: any three asterisks divide, also those of ``***bold italics***``; a divider at the start or the end is
    ignored. Fixed: a divider is a line of its own.
    """
    parts = re.split(r"\s?\*\*\*\s?", response)
    inside = parts[1:-1]
    official = all(part.strip() for part in inside) and sum(bool(part.strip()) for part in parts) == num_paragraphs
    blocks = re.split(r"(?m)^[ \t]*\*\*\*[ \t]*$", response)
    filled = [block for block in blocks if block.strip(' \n\t\r"“”')]
    fixed = len(filled) == num_paragraphs and all(block in filled for block in blocks[1:-1])
    return Verdict(official, fixed)


def nth_paragraph_first_word(response: str, *, num_paragraphs: int, nth_paragraph: int, first_word: str) -> Verdict:
    r"""Exactly ``num_paragraphs`` paragraphs between blank lines, and paragraph ``nth_paragraph`` starts with a word.

    Official: counts the chunks between ``\n\n`` that are not blank but takes the nth of all of them, so a blank chunk
    before it fails the response or shifts the paragraph; a ``first_word`` of two words never passes; punctuation other
    than ``. , ? ! ' "`` stays in the word, while "it" passes for "It's" (sieval#104). Fixed: blank chunks are no
    paragraphs, as many words as ``first_word`` has are compared, without the punctuation around them.
    """
    chunks = response.split("\n\n")
    chunk = chunks[nth_paragraph - 1].split() if nth_paragraph <= len(chunks) else []
    opening = re.split(r"[.,?!'\"]", chunk[0].lstrip("'").lstrip('"'))[0].lower() if chunk else None
    filled = sum(bool(part.strip()) for part in chunks)
    official = filled == num_paragraphs and opening == first_word.lower()
    parts = paragraphs(response)
    expected = [bare(word).casefold() for word in first_word.split()]
    words = parts[nth_paragraph - 1].split() if nth_paragraph <= len(parts) else []
    first_words = [word for word in map(bare, words) if word][: len(expected)]
    return Verdict(official, len(parts) == num_paragraphs and [word.casefold() for word in first_words] == expected)


def number_placeholders(response: str, *, num_placeholders: int) -> Verdict:
    """At least ``num_placeholders`` placeholders in square brackets, such as [address].

    Official: any pair of brackets in a line. Fixed: no empty pair, number, box of a task list or text of a link.
    """
    pairs = re.findall(r"\[.*?\]", response)
    placeholders = [
        name
        for name in re.findall(r"\[([^\[\]\n]+)\](?!\()", response)
        if any(map(str.isalpha, name)) and name.strip() not in ("x", "X")
    ]
    return Verdict(len(pairs) >= num_placeholders, len(placeholders) >= num_placeholders)


def postscript(response: str, *, postscript_marker: str) -> Verdict:
    """At the end, a postscript that starts with a marker such as P.S. or P.P.S.

    Official: the marker occurs anywhere, in any case, also inside a sentence, with nothing after it, or
    (P.S.) inside P.P.S. Fixed: it starts a line of the last two paragraphs (a closing phrase may follow), after other
    text, and text follows it.
    """
    marker = postscript_marker.strip()
    published = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    try:
        official = bool(re.search(published, response.lower()))
    except re.error:
        official = False
    start = re.search(rf"(?im)^{_DECORATION}{_as_written(marker)}(?!\w)[.:*_\s-]*(?=\w|[^\x00-\x7f])", response)
    if start is None or not response[: start.start()].strip(' \n\t\r"“'):
        return Verdict(official, False)
    return Verdict(official, len(paragraphs(response[start.start() :])) <= 2)


def _as_written(marker: str) -> str:
    letters = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s"}
    return letters.get(marker, re.escape(marker))


def number_bullet_lists(response: str, *, num_bullets: int) -> Verdict:
    """Exactly ``num_bullets`` bullet points of markdown.

    Official: lines that start with "-" or a single "*", so a ruler, a negative number, or a line that begins with
    *italics* counts, and "+" does not. Fixed: lines that start with "*", "-" or "+", white space and text.
    """
    stars = re.findall(r"^[^\S\n]*\*[^*].*$", response, flags=re.MULTILINE)
    dashes = re.findall(r"^[^\S\n]*-.*$", response, flags=re.MULTILINE)
    items = [
        item for item in re.findall(r"^[ \t>]*[*+-][ \t]+(\S.*)$", response, flags=re.MULTILINE) if item.strip("*-_ \t")
    ]
    return Verdict(len(stars) + len(dashes) == num_bullets, len(items) == num_bullets)


def constrained_response(response: str) -> Verdict:
    """The answer is one of "My answer is yes.", "My answer is no." and "My answer is maybe.".

    Official: any of them occurs. Fixed: exactly one of them does, so a list of all the options fails; other text may
    surround it, as some of the published prompts ask for.
    """
    n_options = sum(option in response for option in _OPTIONS)
    return Verdict(n_options > 0, n_options == 1)


def number_highlighted_sections(response: str, *, num_highlights: int) -> Verdict:
    """At least ``num_highlights`` sections highlighted with asterisks, such as *this*.

    Official: ``***both***`` counts twice, and any text between two asterisks of a line counts: that in "2 * 3 * 4", or
    between the mark of a list item and the next asterisk, so that what the item highlights is missed. Fixed: an
    emphasis of markdown, once, which neither begins nor ends with white space.
    """
    single = re.findall(r"\*([^\n*]*)\*", response)
    double = re.findall(r"\*\*([^\n*]*)\*\*", response)
    official = sum(bool(text.strip()) for text in single + double) >= num_highlights
    emphases = re.findall(r"(?<!\*)(\*{1,3})(?![\s*])[^\n*]*[^\s*]\1(?!\*)", response)
    return Verdict(official, len(emphases) >= num_highlights)


def multiple_sections(response: str, *, section_spliter: str, num_sections: int) -> Verdict:
    """``num_sections`` sections, each of which begins with a mark and its number, such as "Section 1".

    Official: the mark with any number occurs at least so often, also inside a sentence. Fixed: at least so many lines
    with different numbers begin with it (a prompt may ask for two versions, each with its sections).
    """
    mark = section_spliter.strip()
    try:
        official = len(re.findall(rf"{mark}\s?\d+", response)) >= num_sections
    except re.error:
        official = False
    numbers = re.findall(rf"(?m)^{_DECORATION}{re.escape(mark)}[ \t]?(\d+)\b", response)
    return Verdict(official, len(set(numbers)) >= num_sections)


def json_format(response: str) -> Verdict:
    """The entire response is JSON, with or without the backticks of markdown around it.

    Official: any JSON value, a bare number or string too, NaN too, and an opening fence without a closing one. Fixed:
    an object or an array of standard JSON, the fence closed.
    """
    text = response.strip()
    fence = re.fullmatch(r"```[ \t]*(?:json)?\s(.*?)```", text, flags=re.DOTALL | re.IGNORECASE)
    for prefix in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(prefix)
    content = fence[1] if fence else response
    return Verdict(
        _is_json(text.removesuffix("```").strip()), content.strip()[:1] in ("{", "[") and _is_json(content, strict=True)
    )


def _is_json(text: str, *, strict: bool = False) -> bool:
    def reject(constant: str) -> NoReturn:
        raise ValueError(constant)

    try:
        json.loads(text, parse_constant=reject if strict else None)
    except (ValueError, RecursionError):
        return False
    return True


def title(response: str) -> Verdict:
    """A title in double angular brackets, such as <<poem of joy>>, anywhere; the verdicts do not differ."""
    titles = re.findall(r"<<[^\n]+>>", response)
    follows = any(text.lstrip("<").rstrip(">").strip() for text in titles)
    return Verdict(follows, follows)


def two_responses(response: str) -> Verdict:
    """Two different responses, separated by six asterisks.

    Official: they differ in any character, so a change of case is enough. Fixed: they differ in their words.
    """
    parts = response.split("******")
    filled = [part.strip() for part in parts if part.strip()]
    official = all(part.strip() for part in parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]
    words = [[bare(word).casefold() for word in part.split() if bare(word)] for part in filled]
    return Verdict(official, official and words[0] != words[1])


def repeat_prompt(response: str, *, prompt_to_repeat: str) -> Verdict:
    """The response first repeats the request word for word without change, then answers it.

    Official: in any case, with exactly its white space, and no answer is needed. Fixed: in its case, with any white
    space, and text follows it.
    """
    official = response.strip().lower().startswith(prompt_to_repeat.strip().lower())
    request, text = prompt_to_repeat.split(), response.split()
    return Verdict(official, text[: len(request)] == request and len(text) > len(request))
