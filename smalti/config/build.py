"""The config of ``smalti data build``: a recipe from raw documents to a clean, deduplicated set."""

import os
import re
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from smalti.config.curate import Preset, TokensConfig
from smalti.config.places import LocalFolder
from smalti.config.schema import Config, NotAllowed, Real, Whole, placement

LANGUAGES = (
    "ar", "bg", "ca", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi", "hu", "id", "it", "ja", "ko",
    "nb", "nl", "pl", "pt", "ro", "ru", "sv", "th", "tr", "uk", "vi", "zh",
)  # fmt: skip
"""Languages that are recognised (ISO 639-1), in ``smalti/data/build/clean/language.py``."""

Repeats = Literal["none", "passages", "paragraphs", "lines"]
"""Spans of text of which later copies are cut."""
REPEAT_WORDS = {"none": 0, "passages": 50, "paragraphs": 20, "lines": 10}
"""Words of a span, or the fewest."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class CodeConfig(Config):
    """What to keep of code repositories; vendored and generated files are dropped."""

    licences: Literal["permissive", "any"] = "permissive"
    """``permissive``: only files whose licence is recognised and permissive (MIT, BSD, Apache-2.0, ISC and the like);
    ``any``: all."""


class BuildInput(Config):
    """A folder or file of raw documents."""

    path: str
    """A folder (read recursively) or file of text, Markdown, HTML, code, JSONL, WARC, PDF, EPUB, DOCX, notebooks, mail,
    man pages (all also .gz, .zst) or Parquet. Also in a store (``s3://``, ``gs://``, ``az://``; one file of
    ``https://`` or ``hf://``)."""
    name: str | None = None
    """Name of the source in the output; absent: the last part of the path, without suffixes."""
    text_field: str = "text"
    """Field with the text, in JSONL and Parquet."""
    id_field: str | None = None
    """Field with the id of the document; absent: the field ``id`` where there is one, else file and row."""
    include: tuple[str, ...] = ()
    """Glob patterns (``*.md``, ``docs/*``) of files to read from a folder; empty: all files of a known kind."""
    encoding: str = "auto"
    """Encoding of text and HTML files; ``auto``: a byte-order mark, what HTML declares, UTF-8, else detected."""
    code: CodeConfig | None = None
    """For code repositories: drop vendored and generated files, and by licence. Absent: nothing."""
    rules: tuple[Preset, ...] = ()
    """Presets of quality rules, applied in this order. Empty: ``safe``, and ``code-light`` for source code.
    ``[none]``: no rules."""

    @property
    def source(self) -> str:
        """The name of the source."""
        return self.name or re.sub(r"(?<=.)\..*", "", os.path.basename(os.path.normpath(self.path)))

    @model_validator(mode="after")
    def _names_a_folder(self) -> Self:
        if not _NAME.fullmatch(self.source):
            raise NotAllowed(
                f"'{self.source}' cannot name a source, of which it is a folder of the output",
                allowed="letters, digits, '.', '_' and '-', of which the first is a letter or digit",
                hint=f"inputs: [{{path: {self.path}, name: NAME}}]",
            )
        if "none" in self.rules and len(self.rules) > 1:
            raise ValueError(f"rules={list(self.rules)}: 'none' cannot be combined with others")
        return self


class BlockConfig(Config):
    """Lists of what is not wanted: text files, an entry a line, ``#`` begins a comment; case does not matter."""

    domains: tuple[str, ...] = ()
    """Files of domains (``example.com``, with subdomains) or beginnings of addresses (``example.com/ads/``). The
    address of a document is its id, where that begins with ``http://`` or ``https://``."""
    url_words: tuple[str, ...] = ()
    """Files of words; a document whose address has one of them between other characters than letters and digits is
    dropped."""
    words: tuple[str, ...] = ()
    """Files of words and phrases; a document with more than ``max_words`` occurrences in its text is dropped."""
    max_words: Whole = Field(0, ge=0)
    """Occurrences of ``words`` that are allowed."""

    @field_validator("domains", "url_words", "words", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _has_a_list(self) -> Self:
        if not self.domains + self.url_words + self.words:
            raise ValueError("block names no list; give domains, url_words or words")
        return self


class SemanticConfig(Config):
    """Documents that say nearly the same as another one, in other words too, are dropped."""

    keep: Real = Field(gt=0, lt=1)
    """Fraction of the training documents to keep; those most similar to a kept one are dropped."""


class BuildConfig(Config):
    """Raw documents -> clean, deduplicated documents; every dropped document is recorded."""

    name: str
    """Name of the set, for its report and its steps."""
    inputs: tuple[BuildInput, ...] = Field(min_length=1)
    """What to read: a path, or a list of paths and of mappings with ``path`` and further fields."""
    output: LocalFolder = placement()
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``, all at once."""
    languages: tuple[str, ...] = ()
    """Languages to keep (ISO 639-1, or with a ``language_model`` its labels); empty: all, also text in none that is
    recognised. Source code has no language."""
    language_model: str | None = None
    """A fastText file that recognises languages (lid.176.ftz, GlotLID; extra ``fasttext``). Absent: by script and
    function words."""
    min_language_score: Real = Field(0.65, ge=0, le=1)
    """Minimum confidence in the language, with ``languages``; below it the document is dropped."""
    html: Literal["auto", "trafilatura", "resiliparse", "tags"] = "auto"
    """How the text of HTML pages is found: by trafilatura or resiliparse (extra ``html``), or by removing tags, scripts
    and navigation. ``auto``: trafilatura where it is installed; the report says which was used."""
    clean: bool = True
    """Remove markup, scripts and lines of boilerplate from texts that are not source code."""
    pii: Literal["replace", "drop", "mark", "keep"] = "replace"
    """E-mail addresses, phone numbers, IP addresses, IBANs, card numbers, keys and tokens: ``replace`` them by
    [EMAIL], [PHONE], [IP], [IBAN], [CARD] and [SECRET]; ``drop`` documents that have one; ``mark`` them in the column
    ``pii`` and change nothing; ``keep`` them, without a search."""
    dedup: Literal["near", "exact", "none"] = "near"
    """``exact``: keep one of equal texts; ``near``: also one of near-duplicates, by the steps of ``smalti data
    dedup``."""
    near_threshold: Real = Field(0.65, gt=0, le=1)
    """Minimum Jaccard similarity of two near-duplicates."""
    semantic: SemanticConfig | None = None
    """Drop what says nearly the same, after other duplicates, until the fraction ``keep`` is left: by the cosine of
    vectors of words within clusters (SemDeDup). Absent: nothing."""
    repeats: Repeats = "none"
    """What is cut out of training documents where it came earlier in the set, word for word, after duplicates are
    dropped: ``passages`` (any ``repeat_words`` consecutive words), ``paragraphs`` or ``lines`` (with as many words or
    more). The first copy stays; held-out documents count as first and are not cut, source code is left out."""
    repeat_words: Whole | None = Field(None, ge=2)
    """Words of a repeated passage; the fewest of a paragraph or line. Absent: 50, 20, 10. Of Chinese, Japanese, Thai,
    Lao, Khmer and Burmese each character counts as a word."""
    decontaminate: tuple[str, ...] = ()
    """Files or folders of evaluation sets (text, JSONL and Parquet; all text fields of JSONL count). Documents that
    share 13 consecutive words with one of them are dropped."""
    block: BlockConfig | None = None
    """Drop documents by lists of domains, words in addresses and words in texts. Absent: none."""
    quality_model: str | None = None
    """File of ``smalti data classifier train``. Its score of each document is in the column ``quality``."""
    min_quality: Real = Field(0.5, ge=0, le=1)
    """Minimum score, with ``quality_model``; below it the document is dropped. 0 keeps all."""
    heldout_frac: Real = Field(0.0, ge=0, lt=0.5)
    """Fraction of documents to hold out from training. Held-out documents are kept even if they are near to one
    another; training documents near to one are dropped."""
    seed: Whole = 17
    """Seed of the choice of held-out documents and of MinHash."""
    max_document_bytes: Whole = Field(1_000_000, ge=1000)
    """Maximum size of a document in bytes; longer ones are cut into parts (``ID#1``, ``ID#2`` ...) at the last blank
    line in the second half of a part, else at a line end, a blank, or between characters."""
    max_file_bytes: Whole = Field(64 << 20, ge=1000)
    """Maximum size in bytes of a text, page, message or other file that is one document, once decompressed; a larger
    one is dropped. Files of JSONL, Parquet, WARC and mbox may have any size."""
    max_expansion: Whole = Field(200, ge=2)
    """Largest ratio of decompressed to compressed size. A file beyond it, if it decompresses to more than
    ``max_file_bytes``, is dropped as a decompression bomb."""
    tokenize: TokensConfig | None = placement(None)
    """Also write token files, as ``smalti data tokenize`` does. Absent: documents only."""
    max_parse_s: Real = Field(60.0, gt=0)
    """Maximum processor time in seconds to find the text of one page, PDF, book or message; it is dropped beyond."""
    workers: Whole | None = placement(None, ge=1)
    """Processes that extract and annotate; absent: one for each core. The result does not depend on it."""
    runner: Literal["native", "ray"] = placement("native")
    """Where steps run: in processes of this machine, or on a Ray cluster whose machines share the files. The result
    does not depend on it."""
    ray_address: str | None = placement(None)
    """Address of the Ray cluster (``ray://host:10001``, ``host:6379``, ``auto``); absent: a cluster on this machine."""
    memory_gb: Real = placement(4.0, gt=0)
    """Approximate memory to find near-duplicates, in GB; a larger set is compared in more parts."""
    work: str | None = placement(None)
    """Folder for the results of steps, which a rerun reuses; absent: ``.NAME.steps`` beside the output. They take up to
    three times the size of the texts."""

    @field_validator("inputs", mode="before")
    @classmethod
    def _paths_are_inputs(cls, value: object) -> object:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple({"path": item} if isinstance(item, str) else item for item in items)

    @field_validator("languages", "decontaminate", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"name '{self.name}' cannot name a folder; use letters, digits, '.', '_' and '-'")
        names = [item.source for item in self.inputs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise NotAllowed(
                f"more than one of the inputs is named '{twice}'",
                allowed="a name of its own for each, of which their documents are a folder",
                hint="inputs: [{path: PATH, name: NAME}, ...]",
            )
        unknown = next((name for name in self.languages if name not in LANGUAGES), None)
        if unknown is not None and self.language_model is None:
            raise NotAllowed(
                f"language '{unknown}' is not recognised",
                allowed=", ".join(LANGUAGES),
                hint="for others give a fastText file: language_model=lid.176.ftz",
            )
        if self.dedup != "near" and "near_threshold" in self.model_fields_set:
            raise ValueError(f"near_threshold has no effect with dedup={self.dedup}")
        if self.repeats != "none" and self.pii == "mark":
            raise ValueError(f"repeats={self.repeats} moves the places that pii=mark writes; use pii=replace or keep")
        if self.repeats == "none" and self.repeat_words is not None:
            raise ValueError("repeat_words has no effect without repeats")
        if self.quality_model is None and "min_quality" in self.model_fields_set:
            raise ValueError("min_quality has no effect without quality_model")
        if self.ray_address is not None and self.runner != "ray":
            raise ValueError(f"ray_address={self.ray_address} has no effect with runner={self.runner}; set runner=ray")
        if self.runner == "ray" and self.workers is not None:
            raise ValueError(
                f"workers={self.workers} has no effect with runner=ray, which uses the cores of the cluster"
            )
        if not self.languages and "min_language_score" in self.model_fields_set:
            raise ValueError("min_language_score has no effect without languages")
        return self
