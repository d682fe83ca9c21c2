"""The step that cuts repeated passages, paragraphs or lines out of training documents.

Guarantees: the first copy stays, held-out documents and source code are unchanged, a document of which no word is left
is dropped and recorded, and the same documents give the same bytes on any number of processes.
"""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.progress import Progress
from smalti.config.build import REPEAT_WORDS, BuildConfig
from smalti.data.build.repeats.find import blocks_of, write_cuts, write_earlier, write_hashes
from smalti.data.build.repeats.spans import without
from smalti.data.build.shards import Shard, run_shards
from smalti.data.documents.heldout import HELDOUT, SPLITS, TRAIN
from smalti.data.documents.parquet import RowWriter
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report
from smalti.data.prepare.dedup.output import OUTPUT_DROP_SCHEMA

_EXAMPLES = 10
_CHARACTERS = 160


def cut_repeats(to: Path, before: Path, config: BuildConfig, progress: Progress) -> None:
    """Write ``documents/``, ``drops/`` and ``report.json`` into ``to``, from those of the step in ``before``."""
    unit, min_words = config.repeats, config.repeat_words or REPEAT_WORDS[config.repeats]
    sources = sorted(path.name for path in (before / "documents").iterdir())
    paths = [before / "documents" / source / f"{split}.parquet" for split in (HELDOUT, TRAIN) for source in sources]
    blocks = [block for path in paths for block in blocks_of(path)]
    hashes = [to / "hashes" / f"{number:08d}.npy" for number in range(len(blocks))]
    tasks = [Shard(path, (block, unit, min_words), block.n_bytes) for path, block in zip(hashes, blocks, strict=True)]
    run_shards(f"reading {unit}", write_hashes, tasks, config, progress)
    progress(f"comparing {unit}", 0, 1, "part")
    earlier = write_earlier(to / "earlier", hashes)
    cuts: dict[tuple[str, int], Path] = {}
    tasks = []
    for number, block in enumerate(blocks):
        if Path(block.path).stem != HELDOUT:
            path = cuts[block.path, block.group] = to / "cuts" / f"{number:08d}.npy"
            tasks.append(Shard(path, (block, number, tuple(earlier), unit, min_words), block.n_bytes))
    run_shards(f"cutting {unit}", write_cuts, tasks, config, progress)
    report = Report()
    longest: list[dict[str, Any]] = []
    totals: dict[str, Any] = {"unit": unit, "min_words": min_words, "documents": 0, "words": 0}
    for source in sources:
        _write(to, before, source, cuts, (report, totals, longest), f"repeats/{unit}")
    for folder in ("hashes", "earlier", "cuts"):
        shutil.rmtree(to / folder, ignore_errors=True)
    totals["examples"] = longest
    record = {"format": 1, "kind": FORMAT_KIND, "complete": True, "entries": ["documents", "drops"]}
    store.write_json(to / RECORD_NAME, record | report.as_json() | {"repeats": totals})


def _write(
    to: Path,
    before: Path,
    source: str,
    cuts: Mapping[tuple[str, int], Path],
    figures: tuple[Report, dict[str, Any], list[dict[str, Any]]],
    rule: str,
) -> None:
    """Write the documents and drops of one source."""
    report, totals, longest = figures
    with ExitStack() as stack:
        drops = stack.enter_context(RowWriter(to / "drops" / f"{source}.parquet", OUTPUT_DROP_SCHEMA))
        for split in SPLITS:
            counts = report.of(source, split)
            path = before / "documents" / source / f"{split}.parquet"
            file = stack.enter_context(pq.ParquetFile(path, page_checksum_verification=True))
            documents = stack.enter_context(RowWriter(to / path.relative_to(before), file.schema_arrow))
            for group in range(file.num_row_groups):
                runs = _runs_of(cuts.get((str(path), group)))
                for number, row in enumerate(file.read_row_group(group).to_pylist()):
                    n_bytes = row["n_bytes"]
                    if number in runs:
                        example = _cut(row, runs[number], source)
                        totals["documents"] += 1
                        totals["words"] += sum(n_words for *_, n_words in runs[number])
                        _remember(longest, example)
                    if not row["text"]:
                        counts.drop(rule, n_bytes)
                        reason = "every word of it is in what came earlier"
                        drops.add({"id": row["id"], "source": source, "split": split, "rule": rule, "reason": reason,
                                   "score": 1.0})  # fmt: skip
                        continue
                    counts.keep(n_bytes, row["n_bytes"])
                    documents.add(row, row["n_bytes"])
            counts.check()


def _runs_of(path: Path | None) -> dict[int, list[tuple[int, int, int]]]:
    runs: dict[int, list[tuple[int, int, int]]] = {}
    rows: npt.NDArray[np.int64] = np.load(path) if path is not None else np.empty((0, 4), np.int64)
    for number, start, end, n_words in rows.tolist():
        runs.setdefault(number, []).append((start, end, n_words))
    return runs


def _remember(longest: list[dict[str, Any]], example: dict[str, Any]) -> None:
    """Keep the longest of different cuts; of equally long ones the first."""
    if len(longest) == _EXAMPLES and example["words"] <= longest[-1]["words"]:
        return
    if all(example["text"] != other["text"] for other in longest):
        longest.append(example)
        longest.sort(key=lambda other: -int(other["words"]))
        del longest[_EXAMPLES:]


def _cut(row: dict[str, Any], runs: Sequence[tuple[int, int, int]], source: str) -> dict[str, Any]:
    """Change the text of ``row``; returns the longest cut, for the report."""
    start, end, n_words = max(runs, key=lambda run: (run[2], -run[0]))
    text = " ".join(row["text"][start : min(end, start + _CHARACTERS)].split())
    row["text"] = without(row["text"], [(first, last) for first, last, _ in runs])
    row["n_bytes"] = len(row["text"].encode())
    return {"source": source, "id": row["id"], "words": n_words, "text": text}
