"""The functions of the two steps that run for each shard: extract documents, annotate them with what a policy reads.

``extract_shard`` writes EXTRACTED, ``annotate_shard`` writes ANNOTATED: the same rows in the same order. No document is
dropped here. The same inputs and options give the same bytes.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.base.errors import RetryableError
from smalti.base.hashing import xxh3_file
from smalti.config.build import BlockConfig
from smalti.data.build.clean import pii
from smalti.data.build.clean.blocklists import Blocklists
from smalti.data.build.clean.language import UNDETERMINED, WITHOUT_BLANKS, identify
from smalti.data.build.clean.language_model import LanguageModel
from smalti.data.build.clean.markup import clean_text
from smalti.data.build.contamination import EvaluationNgrams
from smalti.data.build.extract.read import extract
from smalti.data.build.extract.record import ExtractOptions
from smalti.data.build.inputs import file_digest, local_files
from smalti.data.documents.files import SourceFile
from smalti.data.documents.heldout import split_of
from smalti.data.documents.parquet import RowWriter, rows_per_batch
from smalti.data.prepare.classifier.model import Classifier
from smalti.data.prepare.curate.normalize import normalize
from smalti.data.prepare.curate.rules.presets import presets_by_name
from smalti.data.prepare.curate.rules.rule import Preset, measure

VERSION = 9
"""Raised with every change after which the same inputs would give other rows."""

EXTRACTED = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("encoding", pa.string()),
        ("licence", pa.string()),
        ("problem", pa.string()),
        ("part", pa.string()),
        ("text", pa.large_string()),
    ]
)
"""``kind``: prose, code or html; where there is a ``problem``, the rule that drops the document."""

ANNOTATED = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("kind", pa.string()),
        ("problem", pa.string()),
        ("part", pa.string()),
        ("encoding", pa.string()),
        ("licence", pa.string()),
        ("split", pa.string()),
        ("n_raw_bytes", pa.int64()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("scores", pa.list_(pa.struct([("rule", pa.string()), ("score", pa.float64())]))),
        ("pii", pa.string()),
        ("evaluation", pa.string()),
        ("quality", pa.float64()),
        ("blocked", pa.string()),
        ("digest", pa.string()),
        ("text", pa.large_string()),
    ]
)
"""``pii``: spans as JSON ([start, end, kind]) in the cleaned text before replacement; ``evaluation``: the
evaluation set with which it shares 13 words; ``quality``: the score of a classifier for ``text``; ``blocked``: rule
and entry of a list; ``text``: cleaned and, if asked for, with placeholders."""

SAFE_RULES = ("safe",)
CODE_RULES = ("code-light",)
CODE = "code"
_READ_BYTES = 8 << 20


@dataclass(frozen=True)
class AnnotateOptions:
    """What decides the annotations of a text. Plain data."""

    rules: tuple[str, ...]
    clean: bool
    pii: str
    seed: int
    heldout_frac: float
    evaluation: str | None
    """File of the n-grams of evaluation sets."""
    quality: str | None = None
    """File of a quality classifier."""
    language_model: str | None = None
    """fastText file of languages."""
    block: BlockConfig | None = None
    file_digests: tuple[str, ...] = ()
    """Of the contents of the files that are named here."""


def extract_shard(
    path: Path, source: str, files: tuple[SourceFile, ...], digests: tuple[str, ...], options: ExtractOptions
) -> None:
    """Write the records of ``files`` to ``path``.

    RetryableError if the content of a file is not that of ``digests``: the rows would be stored under another's name.
    """
    with RowWriter(path, EXTRACTED) as writer, local_files(files, path) as readable:
        for file, local in zip(files, readable, strict=True):
            for extracted_row in extract(local, options):
                record = extracted_row.record
                problem = record.problem and record.problem.replace(local.path, file.path)
                row = {
                    "id": record.id,
                    "source": source,
                    "kind": extracted_row.kind,
                    "encoding": extracted_row.encoding,
                    "licence": extracted_row.licence,
                    "problem": problem,
                }
                writer.add(row | {"part": record.part, "text": record.text}, len(record.text))
    for file, digest in zip(files, digests, strict=True):
        if file_digest(file) != digest:
            raise RetryableError(
                f"{file.path} changed while it was read", hint="run the same command again when nothing writes to it"
            )


def list_digests(quality: str | None, language_model: str | None, block: BlockConfig | None) -> tuple[str, ...]:
    """Return the digests of models and lists, each with what it is; the version of fastText decides its scores too."""
    lists = block.model_dump(exclude={"max_words"}) if block else {}
    files = {"quality_model": (quality,), "language_model": (language_model,), **lists}
    digests = [f"{name} {xxh3_file(path)}" for name, paths in files.items() for path in paths if path]
    return (*digests, *([f"fasttext {version('fasttext-predict')}"] if language_model else []))


def annotate_shard(path: Path, extracted: Path, options: AnnotateOptions) -> None:
    """Write the rows of ``extracted`` with annotations to ``path``.

    RetryableError if a model or list is not that of ``options``: the rows would be stored under another's name.
    """
    evaluation = EvaluationNgrams.load(options.evaluation) if options.evaluation else None
    classifier = Classifier.load(options.quality) if options.quality else None
    language_of = LanguageModel.load(options.language_model).identify if options.language_model else identify
    blocklists = Blocklists.read(options.block) if options.block else None
    with RowWriter(path, ANNOTATED) as writer:
        for batch in batches(extracted):
            rows = [_annotated(row, options, language_of) for row in batch]
            if evaluation is not None:
                for row, name in zip(rows, evaluation.found_in([row["text"] for row in rows]), strict=True):
                    row["evaluation"] = name
            for row in rows:
                is_text = row["problem"] is None
                row["quality"] = classifier.score(row["text"]) if classifier and is_text else None
                blocked = blocklists.find(row["id"], row["text"]) if blocklists and is_text else None
                row["blocked"] = " ".join(blocked) if blocked else None
                writer.add(row, len(row["text"]))
    if list_digests(options.quality, options.language_model, options.block) != options.file_digests:
        raise RetryableError("a model or list changed while the build ran", hint="run the same command again")


def batches(path: Path, columns: list[str] | None = None) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a shard in lists of about 8 MiB."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        for batch in file.iter_batches(batch_size=rows_per_batch(file, _READ_BYTES, 512), columns=columns):
            yield batch.to_pylist()


def rules_of(rules: tuple[str, ...], kind: str) -> list[Preset]:
    """Return the presets for a document of this kind: those of the recipe, or the defaults."""
    return presets_by_name(rules or (CODE_RULES if kind == CODE else SAFE_RULES))


def _annotated(
    row: dict[str, Any], options: AnnotateOptions, language_of: Callable[[str], tuple[str, float]]
) -> dict[str, Any]:
    raw = row.pop("text")
    base = {
        "split": split_of(row["id"], seed=options.seed, heldout_frac=options.heldout_frac),
        "n_raw_bytes": len(raw.encode()),
        "language": UNDETERMINED,
        "language_score": 0.0,
        "scores": [],
        "pii": None,
        "evaluation": None,
        "digest": "",
        "text": "",
    }
    if row["problem"] is not None:
        return row | base
    text = normalize(raw)
    is_code = row["kind"] == CODE
    if options.clean and not is_code:
        text = clean_text(text)
    language, confidence = (CODE, 1.0) if is_code else language_of(text)
    text, scores = measure(
        text, [preset for preset in rules_of(options.rules, row["kind"]) if _applies(preset, language)]
    )
    spans = [] if options.pii == "keep" else pii.find(text)
    if options.pii == "replace":
        cleaned, text = text, pii.replace(text, spans)
        assert len(cleaned) or not spans
    return row | base | {
        "language": language,
        "language_score": confidence,
        "scores": [
            {"rule": name, "score": score}
            for rule, name, score in scores
            if not rule.english or language in ("en", UNDETERMINED)
        ],
        "pii": json.dumps(spans) if spans else None,
        "digest": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        "text": text,
    }  # fmt: skip


def _applies(preset: Preset, language: str) -> bool:
    """Whether a preset makes sense: those that count words do not for languages without blanks."""
    return preset.name in ("safe", "none") or language not in WITHOUT_BLANKS
