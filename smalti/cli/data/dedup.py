"""``smalti data dedup``: near-duplicate removal."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.data.arguments import Config, Json, Overrides
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine

if TYPE_CHECKING:
    from smalti.config.dedup import DedupConfig


def dedup(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Drop near-duplicates: MinHash proposes pairs, an exact count decides, each drop names the document that is kept.

    Reads and writes folders in the format of 'smalti data curate'. Held-out documents are all kept; training documents
    that are near to one are dropped. Exit code 3: a source lost more than alarm_frac (the result is written), or the
    self-test failed.
    """
    from smalti.cli.data.report import print_report
    from smalti.config.dedup import DedupConfig
    from smalti.config.load import load

    loaded = load(DedupConfig, config, overrides or []).config
    need_data_extra()
    if dry_run:
        _print_plan(loaded, as_json)
        return
    from smalti.base.units import format_quantity
    from smalti.data.prepare.dedup.job import dedup as run
    from smalti.data.prepare.dedup.report import COLUMNS

    with ProgressLine() as progress:
        report = run(loaded, progress)
    blocks = [
        f"{report.selftest_line()}\n"
        f"{format_quantity(report.near_heldout_documents, 'training document')} dropped because a held-out one is near"
    ]
    if report.n_candidates:
        blocks.insert(0, f"similarity of the {report.n_candidates:,} compared pairs\n{report.histogram_text()}")
    next_step = f"written to {loaded.output}; next: smalti data tokenize CONFIG documents={loaded.output} output=..."
    print_report(report, COLUMNS, as_json, blocks=blocks, notes=report.notes(), next_step=next_step)
    for line in report.alarm_lines():
        print(f"ALARM: {line}", file=sys.stderr)
    if report.alarms:
        raise typer.Exit(3)


def _print_plan(config: "DedupConfig", as_json: bool) -> None:
    """Print the documents, and the probability that MinHash proposes a pair, by similarity; for ``--dry-run``."""
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import print_json, table
    from smalti.data.prepare.dedup.corpus import check_score_field, read_corpus, text_bytes

    corpus = read_corpus(config.documents)
    check_score_field(corpus, config.score_field)
    splits = {
        f"{part.source}/{part.split}": {"documents": part.n_documents, "bytes": text_bytes(part)}
        for part in corpus.parts
    }
    similarities = sorted({config.threshold, *(value / 20 for value in range(8, 20))})
    chances = {f"{value:.2f}": 1 - (1 - value**config.rows) ** config.bands for value in similarities}
    if as_json:
        print_json({"output": config.output, "runner": config.runner, "splits": splits, "proposed_frac": chances})
        return
    rows = [(name, f"{counts['documents']:,}", format_bytes(counts["bytes"])) for name, counts in splits.items()]
    print(table(("split", "documents", "text"), rows))
    print(f"\nprobability 1 - (1 - s^{config.rows})^{config.bands} that a pair of Jaccard similarity s is compared:")
    print(table(("s", "compared"), [(value, format_frac(chance)) for value, chance in chances.items()]))
    print(
        f"near: similarity {config.threshold} or more, over shingles of {config.shingle_words} words; "
        f"runner: {config.runner}"
    )
    print(f"nothing was written; without --dry-run the result goes to {config.output}")
