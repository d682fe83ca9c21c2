"""The config of ``smalti data dedup``. Identity fields decide which documents are kept, placement fields how."""

from typing import Literal, Self

from pydantic import Field, model_validator

from smalti.config.places import LocalFolder
from smalti.config.schema import Config, Real, Whole, placement

Stage = Literal["signatures", "boilerplate", "candidates", "shingles", "pairs", "decisions"]
"""The stages of a deduplication with results in the work folder, in order."""


class DedupConfig(Config):
    """Removal of near-duplicate documents; every dropped document and its partner are recorded."""

    documents: LocalFolder
    """The output folder of ``smalti data curate`` (or of an earlier deduplication)."""
    output: LocalFolder = placement()
    """Local folder that receives ``documents/``, ``drops/``, ``report.json`` and ``report.md``; replaced by a rerun."""
    shingle_words: Whole = Field(3, ge=1, le=32)
    """Consecutive words in each shingle; documents are compared as sets of shingles."""
    threshold: Real = Field(0.65, gt=0, le=1)
    """Minimum Jaccard similarity of the shingles of two near-duplicates, computed exactly."""
    containment: Real | None = Field(None, gt=0, le=1)
    """Minimum fraction of the smaller document's shingles in the larger one for a pair to be near-duplicates too;
    absent: Jaccard alone. Only pairs that MinHash proposes are compared, so a small part of a much larger document is
    mostly missed."""
    bands: Whole = Field(28, ge=1, le=512)
    """Bands of the signature. A pair is a candidate when one band agrees: more bands miss fewer pairs and take
    longer."""
    rows: Whole = Field(5, ge=1, le=64)
    """MinHash values in each band. Fewer rows miss fewer pairs and propose more false candidates."""
    bucket_documents: Whole = Field(20, ge=2)
    """All pairs in a bucket of at most this many documents are candidates. In a larger one (many documents share a
    passage) each document is compared with ``bucket_neighbours`` others of similar signature, and with as many that are
    the same for all (held-out ones first); documents kept beside the same near-duplicate are compared afterwards."""
    bucket_neighbours: Whole = Field(8, ge=1)
    """Comparisons of each kind for a document in a larger bucket; see ``bucket_documents``."""
    boilerplate_documents: Whole | None = Field(10, ge=2)
    """Text at the start and end that this many documents share (navigation, headers, footers) is ignored in the
    comparison, if the content between is a tenth of the document or more. Null: only licence comments of source files
    are ignored."""
    score_field: str | None = None
    """Numeric column; of near-duplicates the document with the highest value is kept (``n_bytes``: the longest), then
    the one with the smallest id. Absent: the smallest id."""
    alarm_frac: Real = Field(0.5, gt=0, le=1)
    """Maximum fraction of a source's training documents to drop without an alarm; with an alarm the result is written
    and the exit code is 3."""
    selftest_documents: Whole = Field(200, ge=20, le=10_000)
    """Number of copies, edits and unrelated texts, made from the corpus, that are planted to test each run, then
    removed."""
    selftest_recall: Real = Field(0.95, ge=0, le=1)
    """Minimum fraction of planted near-duplicates found; below it nothing is written (exit code 3)."""
    selftest_precision: Real = Field(0.99, ge=0, le=1)
    """Minimum fraction of found documents that were planted as near-duplicates; below it nothing is written (exit code
    3)."""
    seed: Whole = 17
    """Seed of MinHash and of the planted documents."""
    runner: Literal["native", "ray"] = placement("native")
    """Daft's runner: this process, or a Ray cluster whose machines share the files."""
    ray_address: str | None = placement(None)
    """Address of the Ray cluster (``ray://host:10001``, ``host:6379``, ``auto``); absent: a cluster on this machine."""
    memory_gb: Real = placement(4.0, gt=0)
    """Approximate memory for each part of the work, in GB; a larger corpus is processed in more parts."""
    work: str | None = placement(None)
    """Folder for the results of stages, in ``FOLDER/smalti-dedup``; absent: ``OUTPUT/.stages``. They take up to the
    size of the texts."""
    keep_stages: bool = placement(False)
    """Keep the results of stages at the end, so that another threshold reuses the signatures."""
    from_stage: Stage | None = placement(None)
    """Repeat this stage and the following ones, even if complete."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.ray_address is not None and self.runner != "ray":
            raise ValueError(f"ray_address={self.ray_address} has no effect with runner={self.runner}; set runner=ray")
        if self.bands * self.rows > 4096:
            raise ValueError(f"bands * rows = {self.bands * self.rows} MinHash values; at most 4096 make sense")
        return self
