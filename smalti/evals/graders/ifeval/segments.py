"""Splits a response into words, paragraphs and sentences.

Functions named ``official_*`` imitate the tokenizers of the published checkers (nltk's punkt and word_tokenize) with
rules of our own; docs/concepts/evals/ifeval.md says how often they differ. The others are used by the fixed verdicts.
"""

import re

# ruff: noqa: RUF001, RUF002 (marks of other scripts are meant)


def _word_set(words: str) -> frozenset[str]:
    return frozenset(words.split())


_MARKS = "\u0300-\u036f\u0900-\u0963\u0971-\u0dff\u0e31-\u0e4e\u064b-\u065f\u0670\u200c\u200d"
WORD_CHARACTER = rf"[\w{_MARKS}]"
"""A character of a word: ``\\w``, which has no vowel signs of Indic scripts, with them."""

_CANDIDATES = re.compile(r"[.?!](?=[)\";}\]*:@'({\[?!\u2018\u2019\u201c\u201d«»]|\s+(?P<next>\S+))")
_INNER_PUNCTUATION = re.compile(r"[)\";}\]*:@'({\[?!,\u2018\u2019\u201c\u201d«»]|--|\.\.+(?=[^.])")
_CLOSERS = re.compile(r"[\"')\]}\u2018\u2019\u201c\u201d»«]+?(?:\s+|(?=--)|$)", re.MULTILINE)
_NUMBER = re.compile(r"-?[.,]?\d[\d,.-]*")
_LETTERS_WITH_DOTS = re.compile(r"[a-z](\.[a-z])+")
# Dotted letters after which nltk's English model, made from newspapers, ends a sentence.
_NOT_ABBREVIATED = frozenset(["e.g", "i.e", "p.s", "p.p.s"])
_ABBREVIATIONS = _word_set(
    "adm aug ave bros calif capt cie co col colo conn corp cos ct dec dr feb fla fri ft ga gen gov ill inc jan jr kan "
    "ky lt ltd maj messrs mg mich minn mr mrs ms mt nev nov oct okla ore pa ph.d prof rep reps sen sep sept sgt sr "
    "ss st sw tenn tues va vs vt wash wed wis yr"
)
_MORE_ABBREVIATIONS = _ABBREVIATIONS | _word_set(
    "al approx apr cf dept e.g ed eds est etc fig i.e jul jun mar no nos p.s p.p.s pp sec tel vol"
)
# Letters that the English model takes for an initial before any word.
_INITIALS = frozenset("cfhlmnrstvw")
# Words that start a sentence after an abbreviation or dots if they are capitalized.
_STARTERS = _word_set(
    "although among both but despite even he however i if in indeed instead it many meanwhile moreover most "
    "nevertheless nonetheless nor similarly since so some the there these they this though thus under when while yet"
)
# Words that do not: newspapers capitalize them inside sentences too, in titles.
_ALSO_CAPITALIZED_INSIDE = _word_set(
    "a all an and are as at be but by can do for from good great have her his i in is it let let's my new no not of oh "
    "on one or our out please she so sir that the their then there this to today up us we well what when who will with "
    "world would you your"
)
_NEAR = 60  # characters around an end mark that decide: more would make the time quadratic
_LIST_MARKER = re.compile(r"[\s\"“*#>(]*(\d+|[A-Za-z]|[ivxIVX]+)")
_CLITICS = re.compile(r"(?i)(?<=[^\s'])('s|'m|'d|'ll|'re|'ve|n't)(?=\s)")
_FUSED = re.compile(r"(?i)\b(can)(not)\b|\b(gim|lem)(me)\b|\b(gon|wan)(na)\b|\b(got)(ta)\b|('t)(is|was)\b|\b(d)('ye)\b")


def official_capital_words(text: str) -> int:
    """Count the tokens without a lowercase letter as the published checker does, with nltk's word_tokenize.

    A contraction is two tokens (``DON'T``), a hyphenated word one; ``I`` counts.
    """
    spaced = re.sub(r"[?!;@#$%&*()\[\]{}<>\"`“”‘’«»\u2012-\u2015]|--+|\.{2,}|,(?!\d)|:(?!\d)", " ", text)
    spaced = re.sub(r"(?i)(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", " ", spaced)
    spaced = _FUSED.sub(lambda match: f" {' '.join(filter(None, match.groups()))} ", _CLITICS.sub(r" \1", spaced + " "))
    return sum(token.isupper() for token in spaced.split())


def capital_words(text: str) -> int:
    """Count the words of at least two letters, all of them capital; a contraction or a hyphenated word is one."""
    words = (re.sub(r"['’]s$", "", word) for word in _bare_words(text))
    return sum(word.isupper() and sum(map(str.isalpha, word)) > 1 for word in words)


def word_count(text: str) -> int:
    """Count the words between white space; what has neither letter nor digit is not a word."""
    return len(_bare_words(text))


def _bare_words(text: str) -> list[str]:
    return [word for word in map(bare, text.split()) if word]


def bare(word: str) -> str:
    """Return ``word`` without the punctuation around it."""
    return re.sub(rf"^[\W_]+|(?:[^\w{_MARKS}]|_)+$", "", word)


def paragraphs(text: str) -> list[str]:
    """Return the stretches of ``text`` between blank lines, without the empty ones."""
    return [paragraph.strip() for paragraph in re.split(r"\n[^\S\n]*\n", text) if paragraph.strip()]


def sentence_count(text: str) -> int:
    """Count sentences: they end with one of ``. ? ! … 。 ！ ？ । ؟``, and closing quotes and brackets belong to them.

    No sentence ends after an abbreviation, an initial or the number of a list item, nor before a word in lowercase
    (unless the whole text is). A paragraph without an end mark, such as a heading, is none, unless all are.
    """
    lowercase = text == text.lower()
    count = sum(_sentences_of(paragraph, lowercase) for paragraph in paragraphs(text))
    return max(count, int(any(map(str.isalnum, text))))


def _sentences_of(paragraph: str, lowercase: bool) -> int:
    count, start = 0, 0
    for match in re.finditer(r"[.?!…।؟]+[\"'”’)\]}*_]*(?=\s|$)|[。！？]+[」』”]*", paragraph):
        before = paragraph[max(0, match.start() - _NEAR) : match.start()]
        rest = paragraph[match.end() : match.end() + _NEAR].lstrip(" \t\n\"'“‘([*_")
        is_dot = match[0].startswith(".") and not match[0].startswith("..")
        abbreviated = is_dot and rest and _is_abbreviation((before.split() or [""])[-1])
        continues = abbreviated or (rest[:1].islower() and not lowercase)
        if continues or _LIST_MARKER.fullmatch(before.rsplit("\n", 1)[-1]):
            continue
        count += any(map(str.isalpha, paragraph[start : match.end()]))
        start = match.end()
    return count + (count > 0 and any(map(str.isalpha, paragraph[start:])))


def _is_abbreviation(word: str) -> bool:
    base = bare(word).lower()
    is_initial = len(base) == 1 and base.isalpha() and base != "i"
    return base in _MORE_ABBREVIATIONS or is_initial or bool(_LETTERS_WITH_DOTS.fullmatch(base))


def official_sentence_count(text: str) -> int:
    """Count sentences approximately as nltk's English punkt does, which the published checker uses.

    A sentence ends after ``. ? !`` before white space, quotes, brackets, ``*`` or ``:``. A period ends none after an
    abbreviation, an initial or dots, unless the next word commonly starts a sentence. So the number of a list item is a
    sentence, and so is the end of a text in ``**bold.**``; ``etc.`` and ``e.g.`` end one; other scripts have no marks.
    """
    count, start = 0, 0
    spaced = re.sub(r"\s", " ", text)
    # Of the candidates inside a run without white space, only the last counts.
    ends = {spaced.rfind(" ", 0, match.start()) + 1: match for match in _CANDIDATES.finditer(text)}
    for word_start, match in ends.items():
        word = text[word_start : match.end()]
        following = match["next"] or text[match.end()]
        if not _official_break(word, following, _starts_line(text, word_start)):
            continue
        count += bool(text[start : match.end()].strip())
        start = match.start("next") if match["next"] else match.end()
        closers = _CLOSERS.match(text, start)
        start = closers.end() if closers else start
    return count + bool(text[start:].strip())


def _starts_line(text: str, index: int) -> bool:
    while index and text[index - 1] in " \t":
        index -= 1
    return not index or text[index - 1] == "\n"


def _official_break(word: str, following: str, starts_line: bool) -> bool:
    """Whether a sentence ends with ``word``, before the word or mark ``following``."""
    token = _INNER_PUNCTUATION.split(word)[-1].lower().lstrip("#&-`,")
    next_word = re.split("['’]", bare(following).lower())[0] if following[0].isalnum() else ""
    capitalized = following[0].isupper()
    if word[-1] != "." or token in ("", "."):
        return True
    if token.endswith(".."):
        return capitalized and (next_word in _STARTERS or next_word not in _ALSO_CAPITALIZED_INSIDE)
    base = token[:-1]
    if len(base) == 1 and base.isalpha():
        common = next_word in _STARTERS or next_word in _ALSO_CAPITALIZED_INSIDE
        return base not in _INITIALS and (not following[0].isalpha() or (capitalized and (common or starts_line)))
    if _NUMBER.fullmatch(base):
        return not following[0].islower()
    dotted = _LETTERS_WITH_DOTS.fullmatch(base) and base not in _NOT_ABBREVIATED
    if dotted or base in _ABBREVIATIONS or base.split("-")[-1] in _ABBREVIATIONS:
        return capitalized and next_word in _STARTERS
    return True
