"""Drops documents by lists of the user: domains, words in the address, words in the text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import unquote, urlsplit

from smalti.base import store
from smalti.base.errors import DataError
from smalti.config.build import BlockConfig

DOMAIN_RULE = "block/domain"
URL_RULE = "block/url-word"
WORD_RULE = "block/word"

_WORD = re.compile(r"[\w\u0300-\u036f\u0900-\u0dff]+")  # with vowel signs and other marks
_WITHOUT_BLANKS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")
_ADDRESS = re.compile(r"https?://", re.IGNORECASE)


@dataclass(frozen=True)
class Blocklists:
    """The entries of all lists, in lower case."""

    domains: frozenset[str]
    """A domain stands for its subdomains too."""
    prefixes: tuple[str, ...]
    """Beginnings of addresses, without scheme: entries of ``domains`` with a path."""
    url_words: frozenset[str]
    words: frozenset[str]
    """Entries that are one word."""
    phrases: tuple[str, ...]
    """Others: several words, and languages without blanks."""
    max_words: int

    @classmethod
    def read(cls, config: BlockConfig) -> "Blocklists":
        """Read the files of a recipe: an entry a line, ``#`` begins a comment. DataError if one is empty or missing."""
        domains = [re.sub(r"^(https?://)?(www\.)?", "", entry) for entry in _entries(config.domains)]
        words = _entries(config.words)
        single = {word for word in words if _WORD.fullmatch(word) and not _WITHOUT_BLANKS.search(word)}
        return cls(
            frozenset(entry.rstrip("/") for entry in domains if "/" not in entry.rstrip("/")),
            tuple(sorted(entry for entry in domains if "/" in entry.rstrip("/"))),
            frozenset(_entries(config.url_words)),
            frozenset(single),
            tuple(sorted(set(words) - single)),
            config.max_words,
        )

    def find(self, id_: str, text: str) -> tuple[str, str] | None:
        """Return the rule that drops a document and what was found; None: it is kept.

        The address is the id, if it begins with ``http://`` or ``https://``.
        """
        return (self._in_address(id_) if _ADDRESS.match(id_) else None) or self._in_text(text)

    def _in_address(self, address: str) -> tuple[str, str] | None:
        try:
            host = (urlsplit(address).hostname or "").rstrip(".").removeprefix("www.")
        except ValueError:  # such as a bracket that is not closed
            host = ""
        parts = host.split(".")
        for start in range(len(parts)):
            domain = ".".join(parts[start:])
            if domain in self.domains:
                return DOMAIN_RULE, domain
        rest = re.sub(r"^https?://(www\.)?", "", address.lower())
        prefix = next((prefix for prefix in self.prefixes if rest.startswith(prefix)), None)
        if prefix is not None:
            return DOMAIN_RULE, prefix
        matches = self.url_words & set(re.split(r"[\W_]+", unquote(rest)))
        return (URL_RULE, min(matches)) if matches else None

    def _in_text(self, text: str) -> tuple[str, str] | None:
        if not self.words and not self.phrases:
            return None
        lower = text.lower()
        matches = [word for word in _WORD.findall(lower) if word in self.words]
        if self._phrase is not None:
            matches += self._phrase.findall(" ".join(lower.split()))
        return (WORD_RULE, ", ".join(sorted(set(matches))[:5])) if len(matches) > self.max_words else None

    @cached_property
    def _phrase(self) -> re.Pattern[str] | None:
        patterns = [
            re.escape(entry)
            if _WITHOUT_BLANKS.search(entry)
            else rf"(?<![\w\u0900-\u0dff]){re.escape(entry)}(?![\w\u0900-\u0dff])"
            for entry in self.phrases
        ]
        return re.compile("|".join(patterns)) if patterns else None


def _entries(paths: Iterable[str]) -> Sequence[str]:
    """Return the entries of lists, in lower case, blanks within them single."""
    entries: list[str] = []
    for path in paths:
        lines = [" ".join(line.split("#")[0].lower().split()) for line in store.read_text(path).splitlines()]
        if not any(lines):
            raise DataError(f"block: '{path}' has no entries", hint="write an entry a line")
        entries += [line for line in lines if line]
    return entries
