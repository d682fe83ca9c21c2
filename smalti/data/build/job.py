"""``smalti data build``: extract, annotate, select, remove near and similar documents, cut repeats, publish.

Guarantees: the same inputs and recipe give the same files, byte for byte, with any number of processes and after any
kill; every document that was found is in ``documents/`` or in ``drops/``; what did not change is not computed again;
the output is replaced as a whole. Memory does not grow with the input, but for the keys of duplicates and near pairs.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from smalti.base import store
from smalti.base.errors import DataError
from smalti.base.hashing import digest_json, xxh3_file
from smalti.base.progress import Progress, no_progress
from smalti.config.build import BuildConfig, BuildInput
from smalti.config.dedup import DedupConfig
from smalti.config.identity import identity
from smalti.data.build.annotate import VERSION, AnnotateOptions, annotate_shard, extract_shard, list_digests
from smalti.data.build.clean.blocklists import Blocklists
from smalti.data.build.clean.language_model import LanguageModel
from smalti.data.build.contamination import write_ngrams
from smalti.data.build.extract.html import html_method
from smalti.data.build.extract.record import ExtractOptions
from smalti.data.build.inputs import InputShard, find_inputs, input_shards
from smalti.data.build.publish import publish
from smalti.data.build.repeats.cut import cut_repeats
from smalti.data.build.report import BuildReport
from smalti.data.build.select import select
from smalti.data.build.semantic.drop import drop_similar
from smalti.data.build.shards import Shard, run_shards, shards_digest
from smalti.data.documents.files import find_files
from smalti.data.documents.publish import check_not_nested, only_writer
from smalti.data.prepare.classifier.model import Classifier
from smalti.data.prepare.curate.report import RECORD_NAME
from smalti.data.prepare.daft_engine import choose_runner
from smalti.data.prepare.dedup.job import dedup
from smalti.data.prepare.dedup.work_folder import WorkFolder

NEAR = "near"


def build(config: BuildConfig, progress: Progress = no_progress) -> BuildReport:
    """Build the set and write ``config.output``; returns the report, which is also written there.

    Raises:
        DataError: an input is missing or holds no documents, or no document is left.
        UserError: the output holds something else, or another process builds it.
        CheckFailed: the self-test of the near-duplicates failed.
    """
    for item in config.inputs:
        check_not_nested(item.path, config.output, f"input '{item.source}' ({item.path})")
    _check_files(config)
    lists = list_digests(config.quality_model, config.language_model, config.block)
    sources = find_inputs(config.inputs)
    work = work_folder(config)
    for item in config.inputs:
        check_not_nested(item.path, str(work), f"input '{item.source}' ({item.path})")
    store.make_folder(work)
    with only_writer(work):
        shards = input_shards(sources, progress)
        evaluation = _evaluation(config, work)
        html = html_method(config.html)
        digest = digest_json(
            [VERSION, identity(config), html, [shard.digest for shard in shards], evaluation, lists,
             {name: [files.skipped, files.unnamable] for name, files in sources.items()}]
        )  # fmt: skip
        report = BuildReport.up_to_date(config.output, digest)
        if report is not None:
            return report
        choose_runner(config.runner, config.ray_address, "smalti data build")
        annotated = _annotate(config, shards, html, (evaluation, lists), work, progress)
        steps = WorkFolder(work, digest)
        by_source: dict[str, list[Path]] = {source: [] for source in sources}
        for shard, path in zip(shards, annotated, strict=True):
            by_source[shard.source].append(path)
        selected = steps.stage("select", {}, lambda to: select(to, config, sources, by_source, progress))
        _check_not_empty(selected, config)
        done = [selected]
        if config.dedup == NEAR:
            near = _near_config(config, selected, work)
            done.append(steps.stage(NEAR, {}, lambda to: _near(near, to, progress)))
        if config.semantic is not None:
            distinct = done[-1]
            done.append(steps.stage("semantic", {}, lambda to: drop_similar(to, distinct, config, progress)))
        if config.repeats != "none":
            last = done[-1]
            done.append(steps.stage("repeats", {}, lambda to: cut_repeats(to, last, config, progress)))
        report = publish(config, (digest, shards_digest(annotated)), html, done, progress)
        steps.remove()
        _forget(work, {*annotated, *_extracted(config, shards, html, work)})
    return report


def work_folder(config: BuildConfig) -> Path:
    """Return the folder for the results of steps."""
    if config.work:
        return Path(os.path.abspath(config.work), config.name)
    return Path(os.path.abspath(config.output)).parent / f".{config.name}.steps"


def _annotate(
    config: BuildConfig,
    shards: list[InputShard],
    html: str,
    digests: tuple[str | None, tuple[str, ...]],
    work: Path,
    progress: Progress,
) -> list[Path]:
    """Run the two steps that work shard by shard; returns the annotated shards.

    digests: of the evaluation sets, and of models and lists.
    """
    inputs = {item.source: item for item in config.inputs}
    options_of = {name: _annotate_options(config, item, digests, work) for name, item in inputs.items()}
    extracted = _extracted(config, shards, html, work)
    annotated = []
    for shard, path in zip(shards, extracted, strict=True):
        options = options_of[shard.source]
        block = options.block and options.block.max_words
        by_digest = {"evaluation": digests[0], "quality": None, "language_model": None, "block": block}
        settings = [path.stem, VERSION, options.__dict__ | by_digest]
        annotated.append(work / "annotated" / f"{digest_json(settings)}.parquet")
    tasks = [
        Shard(
            path,
            (shard.source, shard.files, shard.file_digests, _extract_options(config, inputs[shard.source], html)),
            shard.n_bytes,
        )
        for shard, path, result in zip(shards, extracted, annotated, strict=True)
        if not result.exists()
    ]
    run_shards("extracting", extract_shard, tasks, config, progress)
    tasks = [
        Shard(result, (path, options_of[shard.source]), shard.n_bytes)
        for shard, path, result in zip(shards, extracted, annotated, strict=True)
    ]
    run_shards("annotating", annotate_shard, tasks, config, progress)
    return annotated


def _extracted(config: BuildConfig, shards: list[InputShard], html: str, work: Path) -> list[Path]:
    inputs = {item.source: item for item in config.inputs}
    options = {name: _extract_options(config, item, html).__dict__ for name, item in inputs.items()}
    return [
        work / "extracted" / f"{digest_json([VERSION, shard.digest, options[shard.source]])}.parquet"
        for shard in shards
    ]


def _extract_options(config: BuildConfig, item: BuildInput, html: str) -> ExtractOptions:
    return ExtractOptions(
        item.text_field,
        item.id_field,
        item.encoding,
        html,
        config.max_document_bytes,
        config.max_file_bytes,
        config.max_expansion,
        float(config.max_parse_s),
        item.code.licences if item.code else None,
    )


def _annotate_options(
    config: BuildConfig, item: BuildInput, digests: tuple[str | None, tuple[str, ...]], work: Path
) -> AnnotateOptions:
    evaluation, lists = digests
    return AnnotateOptions(
        item.rules,
        config.clean,
        config.pii,
        config.seed,
        float(config.heldout_frac),
        str(_ngrams_file(work, evaluation)) if evaluation else None,
        config.quality_model,
        config.language_model,
        config.block,
        lists,
    )


def _check_files(config: BuildConfig) -> None:
    """Load models and lists, before the work begins."""
    if config.quality_model is not None:
        Classifier.load(config.quality_model)
    if config.language_model is not None:
        LanguageModel.load(config.language_model)
    if config.block is not None:
        Blocklists.read(config.block)


def _ngrams_file(work: Path, evaluation: str) -> Path:
    return work / f"evaluation-{evaluation}.npz"


def _evaluation(config: BuildConfig, work: Path) -> str | None:
    """Write the n-grams of the evaluation sets, unless they are there; returns their digest."""
    if not config.decontaminate:
        return None
    files = [[name, [xxh3_file(file.path) for file in find_files(name).files]] for name in config.decontaminate]
    digest = digest_json([VERSION, files])[:32]
    path = _ngrams_file(work, digest)
    if not path.exists():
        for old in work.glob("evaluation-*"):
            old.unlink()
        unfinished = path.with_suffix(".tmp")
        write_ngrams(unfinished, config.decontaminate)
        os.replace(unfinished, path)
    return digest


def _near_config(config: BuildConfig, selected: Path, work: Path) -> DedupConfig:
    return DedupConfig(
        documents=str(selected),
        output=str(work / "near-result"),
        work=str(work / "near-work"),
        threshold=config.near_threshold,
        seed=config.seed,
        memory_gb=config.memory_gb,
        runner=config.runner,
        ray_address=config.ray_address,
    )


def _near(config: DedupConfig, to: Path, progress: Progress) -> None:
    """Run the deduplication; killed, it resumes with its own steps, which are beside ``to``."""
    result = Path(config.output)
    shutil.rmtree(result, ignore_errors=True)
    dedup(config, progress)
    for entry in sorted(result.iterdir()):
        os.replace(entry, to / entry.name)
    result.rmdir()


def _check_not_empty(selected: Path, config: BuildConfig) -> None:
    record: dict[str, Any] = store.read_json(selected / RECORD_NAME)
    splits = [split for source in record["sources"].values() for split in source.values()]
    if sum(split["documents"]["kept"] for split in splits):
        return
    drops: dict[str, int] = {}
    for split in splits:
        for rule, count in split["drops"].items():
            drops[rule] = drops.get(rule, 0) + count["documents"]
    why = ", ".join(f"{rule} {count:,}" for rule, count in sorted(drops.items())) or "the files hold none"
    raise DataError(
        f"no document is left: {why}",
        hint=f"the reasons are in {selected / 'drops'}; milder: rules: [none] of an input, languages: []",
    )


def _forget(work: Path, wanted: set[Path]) -> None:
    """Remove the shards of earlier versions of the inputs or the recipe."""
    for folder in ("extracted", "annotated"):
        for path in (work / folder).glob("*.parquet"):
            if path not in wanted:
                path.unlink()
