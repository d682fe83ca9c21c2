"""``smalti data dedup``: signatures, candidates, exact comparison, decision, output; each lies on disk before the next.

Promises: the same documents and config give the same files, byte for byte, on any runner and after any kill; no
document goes unless it was found near, by an exact count, to one that stays; held-out documents all stay; every drop
names its partner. Memory: texts and signatures in parts of ``memory_gb``; the driver holds numbers of those documents
alone that have a partner.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from smalti.base import store
from smalti.base.errors import DataError, RetryableError, UserError
from smalti.base.hashing import digest_json, sha256_file
from smalti.config.dedup import DedupConfig
from smalti.data.documents.publish import only_writer, publication
from smalti.data.prepare.curate.report import FORMAT_KIND, RECORD_NAME, Report
from smalti.data.prepare.daft_engine import Failures, as_ours
from smalti.data.prepare.dedup import selftest
from smalti.data.prepare.dedup.buckets import PLANTED
from smalti.data.prepare.dedup.corpus import Corpus, Task, check_score_field, read_corpus
from smalti.data.prepare.dedup.decide import Near, Ordered
from smalti.data.prepare.dedup.frames import n_rows_of
from smalti.data.prepare.dedup.output import source_tasks, write_source
from smalti.data.prepare.dedup.plan import Plans
from smalti.data.prepare.dedup.report import DedupReport, account, as_markdown
from smalti.data.prepare.dedup.work_folder import Stages

Progress = Callable[..., None]
"""``progress(what, done, total)`` between the parts of the work, in bytes of documents; or in parts:
``progress(what, done, total, "part")``."""

_BYTES_A_BAND = 100
"""About what the engine needs for one document in one band."""
_BYTES_A_PAIR = 100
"""About what it needs for one pair that a band proposes, until the same pairs of several bands are one."""
_BYTES_A_SHINGLE, _BYTES_A_WORD = 50, 6
"""About what it needs to count one shingle; words of a text, with their blanks, are no shorter on average."""
_CORE_THRESHOLD = 0.65
"""A higher threshold leaves out no less, so that it needs no new stages."""
_HISTOGRAM_BINS = 20
_BESIDE = 2
"""Of the documents that stay beside one that goes, how many are compared with all that are near to it."""
_ROUNDS = 20
"""Most times that what stays is looked through again; it ends by itself after two or three."""

_PAIRS = pa.schema([("a", pa.int64()), ("b", pa.int64())])
_COMPARED = pa.schema([*_PAIRS, ("jaccard", pa.float64()), ("containment", pa.float64())])


def dedup(config: DedupConfig, progress: Progress | None = None) -> DedupReport:
    """Run the whole job and write ``config.output``; returns the report that is also written there.

    DataError when ``config.documents`` is not the output of a curation or is damaged; CheckFailed (exit code 3) when
    the planted documents are not found. An alarm of a source is in the report and raises nothing.
    """
    tell = progress or (lambda *told: None)
    corpus = read_corpus(config.documents)
    check_score_field(corpus, config.score_field)
    _check_output(config)
    # In a folder of the user's everything lies under a name of ours.
    work = (Path(config.work, "smalti-dedup") if config.work else Path(config.output, ".stages")).resolve()
    failures = Failures(work / "failures")
    plans = Plans(config, failures)
    with (
        _full_disk_named(config.output, work),
        publication(config.output, kind=FORMAT_KIND, record_name=RECORD_NAME) as result,
        _locked(work),
    ):
        stages = Stages(work, f"{corpus.digest} {plans.version}", config.from_stage)
        run = _Run(config, corpus, plans, tell)
        decisions = run.stages(stages)
        tell("writing", 0, 1, "part")
        target = result.work.resolve()
        tasks = source_tasks(corpus, decisions / "decisions.parquet", target)
        answers = [json.loads(answer) for answer in run.plans.each(write_source, tasks)]
        found = {source: counts for answer in answers for source, counts in answer.items()}
        report = _report(config, decisions, {source: found[source] for source in sorted(found)})
        store.write_text(target / "report.md", as_markdown(report))
        files = {path.relative_to(target).as_posix(): sha256_file(path) for path in sorted(target.rglob("*.parquet"))}
        result.record = report.as_json() | {
            "config": _identity(config),
            "documents_digest": corpus.digest,
            "files": files,
            "digest": digest_json(files),
        }
    if not config.keep_stages:
        shutil.rmtree(failures.folder, ignore_errors=True)
        stages.remove()
    return report


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """The folder of the stages, made and for this process alone."""
    store.make_folder(work)
    with only_writer(work):
        yield


@contextmanager
def _full_disk_named(output: str, work: Path) -> Iterator[None]:
    """What writes Parquet does not say where the disk is full; of the places that a run writes to, we do."""
    try:
        yield
    except (OSError, RetryableError) as error:
        ours = as_ours(error, work)
        if not isinstance(ours, RetryableError):
            raise
        hint = f"free space in {work} (or name another folder: work=FOLDER) and {output}; then the same command again"
        raise RetryableError(ours.message, hint=hint) from error


def _check_output(config: DedupConfig) -> None:
    here, there = os.path.realpath(config.documents), os.path.realpath(config.output)
    if os.path.commonpath([here, there]) in (here, there):
        raise UserError(
            f"the documents ({config.documents}) and the output ({config.output}) lie one in the other",
            hint="choose an output folder beside the documents",
        )
    record = Path(there) / RECORD_NAME
    if record.exists():
        found = store.read_json(record)
        if isinstance(found, dict) and found.get("complete") and "dedup" not in found:
            raise UserError(
                f"{config.output} was written by 'smalti data curate'; it would be lost",
                hint="name another output folder",
            )


def _identity(config: DedupConfig) -> dict[str, Any]:
    from smalti.config.identity import identity

    return identity(config)


@dataclass
class _Run:
    """The stages, each from the folders of those before it."""

    config: DedupConfig
    corpus: Corpus
    plans: Plans
    tell: Progress

    def stages(self, stages: Stages) -> Path:
        """Make what is missing; the folder of the decisions."""
        config = self.config
        signing = ("shingle_words", "bands", "rows", "score_field", "selftest_documents", "seed")
        signed = stages.stage("signatures", _some(config, signing), self._sign)
        max_core_frac = 1 - min(config.threshold, _CORE_THRESHOLD)
        masking = _some(config, ("boilerplate_documents",)) | {"max_core_frac": max_core_frac}
        masked = stages.stage("boilerplate", masking, lambda to: self._mask(signed, max_core_frac, to))
        limits = _some(config, ("bucket_documents", "bucket_neighbours"))
        proposed = stages.stage("candidates", limits, lambda to: self._propose(signed, masked, to))
        sets = stages.stage("shingles", {}, lambda to: self._shingle(signed, masked, proposed, to))
        compared = stages.stage("pairs", {}, lambda to: self._compare(proposed, sets, to))
        bounds = _some(config, ("threshold", "containment", "selftest_recall", "selftest_precision"))
        return stages.stage("decisions", bounds, lambda to: self._decide(signed, masked, sets, compared, to))

    def _sign(self, to: Path) -> None:
        selftest.plant(self.corpus, self.config, self.plans.normalised, to / "planted.parquet")
        # The planted file moves with its stage, so it is read under the name that it has now.
        tasks = [*selftest.planted_tasks(to / "planted.parquet"), *self.corpus.tasks()]
        self._by_portions("signatures", tasks, lambda portion: self.plans.signatures(portion, to / "rows"))
        n_rows = n_rows_of(to / "rows")
        n_planted = pq.read_metadata(to / "planted.parquet").num_rows
        assert n_rows == self.corpus.n_documents + n_planted, (
            f"{n_rows} signatures of {self.corpus.n_documents} documents"
        )

    def _mask(self, signed: Path, max_core_frac: float, to: Path) -> None:
        """Find what is left out of the comparison; ``compared`` holds the documents that this changes."""
        plans, signatures = self.plans, signed / "rows"
        plans.equal(signatures, to / "equal")
        plans.repetitive(signatures, to / "seen" / "repetitive")
        if self.config.boilerplate_documents is not None:
            for number, (group, part) in enumerate(self._pieces(self.corpus.n_documents * _BYTES_A_BAND)):
                self.tell("boilerplate", number, self.config.bands, "part")
                plans.crowds(signatures, to / "equal", group, part, to / "seen" / f"{number}")
        keys = crowd = np.empty(0, np.int64)
        for folder in sorted((to / "seen").iterdir()):
            for rows in _portions(folder):
                found, many = _numbers(rows, "key"), _numbers(rows, "crowd")
                keys, crowd = np.union1d(keys, found), np.union1d(crowd, found[many & (found < PLANTED)])
        tasks = self._tasks_of(keys, signed)
        self._by_portions("boilerplate", tasks, lambda portion: plans.words(portion, to / "words"))
        common = [np.empty(0, np.int64)]
        if len(crowd):
            n_bytes = sum(task.n_bytes for task in tasks) * _BYTES_A_SHINGLE // _BYTES_A_WORD
            n_parts = math.ceil(n_bytes / (self.config.memory_gb * 2**30))
            common += [plans.common(to / "words", pa.table({"key": crowd}), (i, n_parts)) for i in range(n_parts)]
        np.save(to / "common.npy", np.concatenate(common))
        if tasks:
            plans.compared(to / "words", to / "seen" / "repetitive", to / "common.npy", max_core_frac, to / "compared")
        shutil.rmtree(to / "seen")

    def _propose(self, signed: Path, masked: Path, to: Path) -> None:
        # Bands are alike, so one tells how many pairs there will be in each.
        pairs_bytes = self.plans.count_pairs(signed / "rows", masked, 0) * _BYTES_A_PAIR
        pieces = self._pieces(self.corpus.n_documents * _BYTES_A_BAND + pairs_bytes)
        for number, (group, part) in enumerate(pieces):
            self.tell("candidates", number, len(pieces), "part")
            self.plans.candidates(signed / "rows", masked, group, part, to / "parts" / f"{number}")
        if len(pieces) == 1:
            os.replace(to / "parts" / "0", to / "pairs")
        else:
            self.plans.distinct(to / "parts", to / "pairs")
        shutil.rmtree(to / "parts")

    def _pieces(self, band_bytes: int) -> list[tuple[Sequence[int], tuple[int, int]]]:
        """Groups of bands, and shards (i of n) of them, that fit into memory when a band takes ``band_bytes``."""
        n_parts = math.ceil(self.config.bands * band_bytes / (self.config.memory_gb * 2**30))
        bands = range(self.config.bands)
        per_part = math.ceil(self.config.bands / n_parts)
        groups = [bands[at : at + per_part] for at in range(0, self.config.bands, per_part)]
        n_shards = math.ceil(n_parts / len(groups))
        return [(group, (shard, n_shards)) for group in groups for shard in range(n_shards)]

    def _tasks_of(self, keys: npt.NDArray[np.int64], signed: Path) -> list[Task]:
        """Tasks that read these documents, planted ones too."""
        planted = keys[keys >= PLANTED]
        tasks = self.corpus.tasks_of(keys[keys < PLANTED])
        if len(planted):
            (task,) = selftest.planted_tasks(signed / "planted.parquet")
            tasks.append(Task(**{**vars(task), "rows": (planted - PLANTED).tolist()}))
        return tasks

    def _shingle(self, signed: Path, masked: Path, proposed: Path, to: Path) -> None:
        keys = np.empty(0, np.int64)
        for pairs in _portions(proposed / "pairs"):
            keys = np.unique(np.concatenate([keys, _numbers(pairs, "a"), _numbers(pairs, "b")]))
        keys = np.setdiff1d(keys, _numbers(_read(masked / "words", ["key"]), "key"))
        tasks = self._tasks_of(keys, signed)
        self._by_portions("shingles", tasks, lambda portion: self.plans.shingles(portion, to / "rows"))
        if n_rows_of(masked / "words"):
            self.plans.shingles_of(masked / "words", masked / "compared", to / "rows")
        (to / "rows").mkdir(exist_ok=True)

    def _compare(self, proposed: Path, sets: Path, to: Path) -> None:
        n_pairs = n_rows_of(proposed / "pairs")
        if not n_pairs:
            (to / "rows").mkdir()
            return
        self._compare_all(proposed / "pairs", n_pairs, sets, to / "rows")

    def _compare_all(self, pairs: Path, n_pairs: int, sets: Path, to: Path) -> None:
        metadata = [pq.read_metadata(path) for path in (sets / "rows").glob("*.parquet")]
        sets_bytes = sum(one.row_group(i).total_byte_size for one in metadata for i in range(one.num_row_groups))
        mean_bytes = sets_bytes / max(sum(one.num_rows for one in metadata), 1)
        n_parts = math.ceil(n_pairs * 2 * mean_bytes / (self.config.memory_gb * 2**30))
        for number in range(n_parts):
            self.tell("comparing", number, n_parts, "part")
            self.plans.compare(pairs, sets / "rows", (number, n_parts), to)
        n_compared = n_rows_of(to)
        assert n_compared == n_pairs, f"{n_compared} of {n_pairs} pairs were compared"

    def _decide(self, signed: Path, masked: Path, sets: Path, compared: Path, to: Path) -> None:
        self.tell("deciding", 0, 1, "part")
        config = self.config
        histogram = np.zeros(_HISTOGRAM_BINS, np.int64)
        near = self._near(compared / "rows", histogram)
        equal = _read(masked / "equal", ["key", "node"]).sort_by("key")
        keys = np.unique(np.concatenate([_numbers(near, "a"), _numbers(near, "b"), _numbers(equal, "key")]))
        about = self.plans.about(signed / "rows", pa.table({"key": keys}))
        ordered = Ordered(about, _numbers(equal, "key"), _numbers(equal, "node"))
        near = self._complete(ordered, near, sets, to, histogram)
        gone = ordered.decide(_as_near(near), config.threshold)
        test = selftest.score(
            signed / "planted.parquet", config, self.plans.normalised, self._compared_words(signed, masked), equal, gone
        )
        selftest.check(config, test)
        gone = gone.filter(pc.less(gone.column("key"), PLANTED))
        pq.write_table(gone, to / "decisions.parquet", row_group_size=1 << 16)
        n_near = near.filter(pc.less(near.column("b"), PLANTED)).num_rows
        figures = {"candidates": int(histogram.sum()), "near": n_near, "histogram": histogram.tolist()}
        store.write_json(to / "figures.json", {**figures, "selftest": vars(test)})

    def _compared_words(self, signed: Path, masked: Path) -> dict[int, str]:
        """Key -> the words that are compared instead of all, of what was planted and its partners."""
        planted = pq.read_table(signed / "planted.parquet", columns=["key", "partner"])
        keys = pa.array(np.concatenate([_numbers(planted, "key"), _numbers(planted, "partner")]), pa.int64())
        found: dict[int, str] = {}
        for rows in _portions(masked / "compared"):
            some = rows.filter(pc.is_in(rows.column("key"), keys))
            found |= dict(zip(some.column("key").to_pylist(), some.column("words").to_pylist(), strict=True))
        return found

    def _complete(self, ordered: Ordered, near: pa.Table, sets: Path, to: Path, histogram: Any) -> pa.Table:
        """``near`` and what it lacks: not all near documents of a crowded bucket have met.

        Two that stay are compared when one that goes is near to both, until no such pair is near: so of a family of
        thousands one stays, as if all its pairs had been compared.
        """
        met: set[tuple[int, int]] = set()
        for number in range(_ROUNDS):
            a, b = ordered.unmet(_as_near(near), _BESIDE)
            new = [pair for pair in zip(a.tolist(), b.tolist(), strict=True) if pair not in met]
            if not new:
                break
            met.update(new)
            folder = to / f"round-{number}"
            (folder / "pairs").mkdir(parents=True)
            table = pa.table({"a": [pair[0] for pair in new], "b": [pair[1] for pair in new]}, _PAIRS)
            pq.write_table(table, folder / "pairs" / "pairs.parquet")
            self._compare_all(folder / "pairs", len(new), sets, folder / "rows")
            found = self._near(folder / "rows", histogram)
            shutil.rmtree(folder)
            if not found.num_rows:
                break
            near = pa.concat_tables([near, found])
        return near

    def _near(self, compared: Path, histogram: Any) -> pa.Table:
        """The near ones of the pairs that were compared, sorted; all pairs of real documents go into ``histogram``."""
        config = self.config
        found = [_COMPARED.empty_table()]
        for pairs in _portions(compared):
            real = pairs.filter(pc.less(pairs.column("b"), PLANTED))
            histogram += np.histogram(_numbers(real, "jaccard"), _HISTOGRAM_BINS, (0, 1))[0]
            is_near = pc.greater_equal(pairs.column("jaccard"), config.threshold)
            if config.containment is not None:
                is_near = pc.or_(is_near, pc.greater_equal(pairs.column("containment"), config.containment))
            found.append(pairs.filter(is_near).select(_COMPARED.names).cast(_COMPARED))
        return pa.concat_tables(found).sort_by([("a", "ascending"), ("b", "ascending")])

    def _by_portions(self, what: str, tasks: list[Task], do: Callable[[list[Task]], None]) -> None:
        """``do`` with so many tasks at a time as memory allows for."""
        limit = self.config.memory_gb * 2**30 / 8
        portion: list[Task] = []
        size = done = 0
        total = sum(task.n_bytes for task in tasks)
        for task in tasks:
            if portion and size + task.n_bytes > limit:
                do(portion)
                done += size
                self.tell(what, done, total)
                portion, size = [], 0
            portion.append(task)
            size += task.n_bytes
        if portion:
            do(portion)


def _report(config: DedupConfig, decisions: Path, found: dict[str, Any]) -> DedupReport:
    figures = store.read_json(decisions / "figures.json")
    accounts = Report()
    for source, counts in found.items():
        account(accounts, source, counts)
    test = selftest.SelftestReport(**figures["selftest"])
    numbers = (figures["candidates"], figures["near"], figures["histogram"])
    return DedupReport(accounts, test, config.alarm_frac, *numbers)


def _some(config: DedupConfig, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def _portions(folder: Path) -> Iterator[pa.Table]:
    """A stage's rows for the driver, a row group at a time: numbers, never texts."""
    for path in sorted(folder.glob("*.parquet")):
        try:
            with pq.ParquetFile(path) as file:
                yield from (file.read_row_group(group) for group in range(file.num_row_groups))
        except pa.ArrowException as error:
            raise DataError(f"{folder} cannot be read: {error}", hint="remove that folder and run again") from error


def _read(folder: Path, columns: list[str]) -> pa.Table:
    """A stage's integers."""
    tables = [table.select(columns) for table in _portions(folder)]
    return pa.concat_tables([pa.schema([(name, pa.int64()) for name in columns]).empty_table(), *tables])


def _as_near(pairs: pa.Table) -> Near:
    return Near(*(_numbers(pairs, name) for name in _COMPARED.names))


def _numbers(table: pa.Table, name: str) -> npt.NDArray[Any]:
    return np.asarray(table.column(name))
