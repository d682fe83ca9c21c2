"""A document of the corpus before it is written, and simple measures of texts that do not use Smalti's code."""

import re
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

LANGUAGES = ("de", "en", "es", "fr", "ja")
"""Languages that the recipe keeps."""
COMMON = {
    "de": "der die das und ist nicht ein eine mit auf für den dem von zu wird werden oder sie in",
    "en": "the of and to a in is that for it with as be this are or on by not from you can",
    "es": "el la los las de que y en un una es no se por con para del al su como o",
    "fr": "le la les de des et en un une est que pour dans ne pas par sur ou vous du",
}
"""A few of the most frequent words of languages, for ``is_prose``."""
_EAST = re.compile(r"[\u3041-\u30ff\u3400-\u9fff\uac00-\ud7a3]")
_KANA = re.compile(r"[\u3041-\u30ff]")
_WIDE = (
    r"[\u3041-\u3096\u3099-\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uff66-\uff9f]"
)
_ALONE = r"\u3001-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uff00-\uffef"
_PLAIN = re.compile(rf"[{_ALONE}]|[^\s{_ALONE}]+")
_WORD = re.compile(rf"{_WIDE}|(?:(?!{_WIDE})\w)+")


_GUARD = r"#[ \t]*ifndef[ \t]+\w+[ \t]*\n#[ \t]*define[ \t]+\w+[ \t]*(?=\n)"
_LINE = r"(?://|#(?![ \t]*(?:include|define|if|ifdef|ifndef|pragma)\b))[^\n]*(?:\n|$)"
_HEAD = re.compile(rf"(?:\s*(?:/\*.*?\*/|{_GUARD}|{_LINE}))+", re.DOTALL)


@dataclass
class Document:
    """A real document: a file, or a row of JSONL with its text in memory."""

    source: str
    name: str
    """Id in the source: the path of a file inside it, or the ``id`` of a row."""
    kind: str
    """``html``, ``prose`` or ``code``."""
    language: str | None
    """What its package says; None: unknown."""
    place: Path | None = None
    text: str | None = None
    container: str | None = None
    """File of JSONL in the source that has the row."""
    notes: list[str] = field(default_factory=list)
    """What was planted in it."""

    def read(self) -> str:
        """Return the text of a document that is not HTML; empty if it is not UTF-8."""
        if self.text is not None:
            return self.text
        assert self.place is not None
        try:
            return self.place.read_bytes().decode()
        except UnicodeDecodeError:
            return ""

    @property
    def key(self) -> str:
        """Name in the output."""
        return f"{self.source}/{self.name}"


def head_of(text: str) -> int:
    """Return the end of the comments at the head of source code, where its licence is, and of an include guard."""
    match = _HEAD.match(text)
    return match.end() if match else 0


def tokens(text: str) -> list[str]:
    """Words as they are written; of Chinese and Japanese each character, also punctuation."""
    return _PLAIN.findall(text)


def words(text: str) -> list[str]:
    """Words in lower case, without punctuation; of Chinese and Japanese each character."""
    text = "".join(char for char in text.lower() if char.isascii() or unicodedata.category(char) != "Cf")
    return _WORD.findall(text)


def shingles(text: str) -> set[tuple[str, ...]]:
    """All runs of three words."""
    listed = words(text)
    return set(zip(listed, listed[1:], listed[2:], strict=False)) or ({tuple(listed)} if listed else set())


def jaccard(first: set[tuple[str, ...]], second: set[tuple[str, ...]]) -> float:
    """Shared shingles among all of both."""
    union = len(first | second)
    return len(first & second) / union if union else 0.0


def label_of(document: Document, text: str) -> str | None:
    """Return the language that its package says, or English for a page that was not translated."""
    if document.language in (None, "en", "ja", "zh", "ko"):
        translated = document.language in (None, "en") or any(map(_EAST.match, text[:2000]))
        return document.language if translated else "en"
    return "en" if is_prose(text, "en") and not is_common(text, document.language or "") else document.language


def is_common(text: str, language: str) -> bool:
    """Whether the words of a language in COMMON are more frequent in a text than those of English."""
    counts = [sum(word in COMMON[name].split() for word in text.lower().split()) for name in (language, "en")
              if name in COMMON]  # fmt: skip
    return len(counts) == 2 and counts[0] > counts[1]


def is_prose(text: str, language: str) -> bool:
    """Whether a text is running prose in a language, by kana or by a few words; lists and tables are not."""
    letters = sum(map(str.isalpha, text))
    if language == "ja":
        return letters >= 60 and len(_KANA.findall(text)) >= 0.25 * letters
    listed = [word for word in text.lower().split() if any(map(str.isalpha, word))]
    common = set(COMMON[language].split())
    return len(listed) >= 30 and sum(word.strip(".,;:()") in common for word in listed) >= 0.15 * len(listed)
