"""The memory of the steps that read a whole set in one process: its growth with each document, in real processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smalti.data.build.annotate import ANNOTATED
from smalti.data.documents.parquet import DOCUMENT_SCHEMA, open_writer

_SHARD_DOCUMENTS = 20_000
SELECT = """
import resource, sys
from pathlib import Path
from smalti.config.build import BuildConfig
from smalti.data.build.select import select
from smalti.data.documents.files import FoundFiles

config = BuildConfig.model_validate({"name": "a", "inputs": ["in"], "output": "out"})
shards = sorted(Path(sys.argv[1]).glob("*.parquet"))
select(Path(sys.argv[2]), config, {"in": FoundFiles(())}, {"in": shards}, lambda *_: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
SEMANTIC = """
import resource, sys
from pathlib import Path
from smalti.config.build import BuildConfig
from smalti.data.build.semantic.drop import drop_similar

plain = {"name": "a", "inputs": ["in"], "output": "out", "workers": 1, "semantic": {"keep": 0.8}}
drop_similar(Path(sys.argv[2]), Path(sys.argv[1]), BuildConfig.model_validate(plain), lambda *_: None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def texts_of(first: int, n: int, duplicate_frac: float) -> list[str]:
    """Texts of 40 words of 2,000; the stated fraction are copies of an earlier one of the same call."""
    rng = np.random.default_rng(first)
    words = np.array([f"w{number}" for number in range(2000)])
    texts = [" ".join(row) for row in words[rng.integers(0, len(words), (n, 40))].tolist()]
    n_unique = round(n * (1 - duplicate_frac))
    return texts[:n_unique] + [texts[number % n_unique] for number in range(n - n_unique)]


def annotated(folder: Path, n: int, duplicate_frac: float = 0.0) -> Path:
    """Shards as the step ``annotate`` writes them."""
    import hashlib

    folder.mkdir()
    for first in range(0, n, _SHARD_DOCUMENTS):
        texts = texts_of(first, min(_SHARD_DOCUMENTS, n - first), duplicate_frac)
        plain: dict[str, Any] = {name: [None] * len(texts) for name in ANNOTATED.names}
        plain |= {"id": [f"crawl/page-{first + i:012d}.html" for i in range(len(texts))], "text": texts}
        plain |= {"source": ["in"] * len(texts), "kind": ["prose"] * len(texts), "split": ["train"] * len(texts)}
        plain |= {"n_raw_bytes": [len(text) for text in texts], "language": ["en"] * len(texts)}
        plain |= {"language_score": [1.0] * len(texts), "scores": [[]] * len(texts)}
        plain["digest"] = [hashlib.blake2b(text.encode(), digest_size=16).hexdigest() for text in texts]
        pq.write_table(pa.table(plain, schema=ANNOTATED), folder / f"{first:09d}.parquet")
    return folder


def documents(folder: Path, n: int) -> Path:
    """The output of the step before ``semantic``."""
    with open_writer(folder / "documents" / "in" / "train.parquet", DOCUMENT_SCHEMA) as writer:
        for first in range(0, n, _SHARD_DOCUMENTS):
            texts = texts_of(first, min(_SHARD_DOCUMENTS, n - first), 0.0)
            ids = [f"crawl/page-{first + i:012d}.html" for i in range(len(texts))]
            sizes = [len(text) for text in texts]
            writer.write_table(pa.table({"id": ids, "text": texts, "group": ids, "n_bytes": sizes}, DOCUMENT_SCHEMA))
    with open_writer(folder / "documents" / "in" / "heldout.parquet", DOCUMENT_SCHEMA):
        pass
    return folder


def peak_bytes(script: str, source: Path, to: Path) -> int:
    to.mkdir()
    done = subprocess.run([sys.executable, "-c", script, source, to], check=True, capture_output=True, text=True)
    return int(done.stdout.split()[-1])


def growth(script: str, folders: dict[int, Path], to: Path) -> float:
    """Bytes for each document between the sizes."""
    (few, first), (many, second) = sorted(folders.items())
    peaks = [peak_bytes(script, folder, to / folder.name) for folder in (first, second)]
    print(json.dumps({"documents": [few, many], "peak_bytes": peaks}))
    return (peaks[1] - peaks[0]) / (many - few)


@pytest.mark.exhaustive  # select of 240,000 documents
@pytest.mark.parametrize(("duplicate_frac", "bound"), [(0.0, 600), (0.5, 600)])
def test_memory_of_select_grows_by_less_than_is_stated(tmp_path, duplicate_frac, bound):
    folders = {n: annotated(tmp_path / f"n{n}", n, duplicate_frac) for n in (40_000, 240_000)}
    (tmp_path / "to").mkdir()
    assert growth(SELECT, folders, tmp_path / "to") < bound


@pytest.mark.exhaustive  # vectors of 120,000 documents
def test_memory_of_similar_documents_grows_by_less_than_is_stated(tmp_path):
    folders = {n: documents(tmp_path / f"n{n}", n) for n in (40_000, 120_000)}
    (tmp_path / "to").mkdir()
    assert growth(SEMANTIC, folders, tmp_path / "to") < 600
