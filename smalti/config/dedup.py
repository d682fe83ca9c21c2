"""The config of ``smalti data dedup``. Identity fields decide which documents stay, placement fields where it runs."""

from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.places import LocalFolder
from smalti.config.schema import Config, Real, Whole, placement

Stage = Literal["signatures", "boilerplate", "candidates", "shingles", "pairs", "decisions"]
"""The stages of a deduplication whose results lie in the work folder, in their order."""


class DedupConfig(Config):
    """Documents -> the same without near-duplicates, with every drop and its partner recorded."""

    documents: LocalFolder
    """The output folder of ``smalti data curate`` (or of an earlier deduplication)."""
    output: LocalFolder = placement()
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``; replaced by a rerun."""
    shingle_words: Whole = Field(3, ge=1, le=32)
    """Words in a row that make one shingle; a document is compared as the set of its shingles."""
    threshold: Real = Field(0.65, gt=0, le=1)
    """Two documents are near when their shingles have this Jaccard similarity or more, counted exactly."""
    containment: Real | None = Field(None, gt=0, le=1)
    """Also near: when this share of the smaller one's shingles occurs in the other. Absent: Jaccard alone decides. Only
    pairs that MinHash proposes are looked at, so a small part of a much larger document is mostly not found."""
    bands: Whole = Field(28, ge=1, le=512)
    """Bands of the signature. A pair is a candidate when one band agrees: more bands miss fewer and cost time."""
    rows: Whole = Field(5, ge=1, le=64)
    """MinHash values in a band. Fewer rows miss fewer and propose more pairs in vain."""
    bucket_documents: Whole = Field(20, ge=2)
    """In a bucket of at most so many documents all pairs are candidates. In a larger one (many documents share a
    passage) each document meets ``bucket_neighbours`` others whose signatures are alike, and as many that are the same
    for all (held-out ones first). What stays beside the same near document is compared afterwards."""
    bucket_neighbours: Whole = Field(8, ge=1)
    """See ``bucket_documents``."""
    boilerplate_documents: Whole | None = Field(10, ge=2)
    """What so many different documents share at their beginning and end (navigation, headers, footers) is left out of
    the comparison, where the contents between are a tenth of the document or more. Null: nothing is left out but
    licence comments of source files."""
    score_field: str | None = None
    """A numeric column of the documents (``n_bytes``: the longest stays). Of near documents the one with the highest
    value stays, then the one with the smallest id. Absent: the smallest id."""
    alarm_frac: Real = Field(0.5, gt=0, le=1)
    """A source that loses more than this share of its training documents raises an alarm: the result is written, the
    exit code is 3."""
    selftest_documents: Whole = Field(200, ge=20, le=10_000)
    """Copies, edits and unrelated texts that are planted in every run, made from the corpus, and taken out again."""
    selftest_recall: Real = Field(0.95, ge=0, le=1)
    """When fewer of the planted documents are found, nothing is written (exit code 3)."""
    selftest_precision: Real = Field(0.99, ge=0, le=1)
    """When fewer of those that were found had been planted as near, nothing is written (exit code 3)."""
    seed: Whole = 17
    """Of MinHash and of the planted documents."""
    runner: Literal["native", "ray"] = placement("native")
    """Where the plan runs: Daft's engine in this process, or a Ray cluster whose machines see the same files."""
    ray_address: str | None = placement(None)
    """Address of the cluster (``ray://host:10001``, ``host:6379``, ``auto``); absent: one on this machine."""
    memory_gb: Real = placement(4.0, gt=0)
    """About how much memory a part of the work may take; a larger corpus is worked on in more parts."""
    work: str | None = placement(None)
    """Folder for the results of stages, which are kept in ``FOLDER/smalti-dedup``; absent: ``OUTPUT/.stages``. They
    take up to the size of the texts."""
    keep_stages: bool = placement(False)
    """Leave the results of stages in place at the end, so that another threshold needs no new signatures."""
    from_stage: Stage | None = placement(None)
    """Do this stage and the following ones again, though they are whole."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.ray_address is not None and self.runner != "ray":
            raise ValueError(f"ray_address={self.ray_address} has no effect with runner={self.runner}; set runner=ray")
        if self.bands * self.rows > 4096:
            raise ValueError(f"bands * rows = {self.bands * self.rows} MinHash values; at most 4096 make sense")
        return self
