"""``smalti data``: from documents to token files, and a look into both."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.data.explain import explain
from smalti.cli.data.inspect import inspect
from smalti.cli.data.pack import pack
from smalti.cli.data.to_mds import to_mds
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine

if TYPE_CHECKING:
    from smalti.config.curate import CurateConfig
    from smalti.config.dedup import DedupConfig

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Curate documents, tokenize them, and look into both.",
)

_Config = Annotated[str, typer.Argument(metavar="CONFIG", help="A .yaml file, or the name of a recipe.")]
_Overrides = Annotated[list[str] | None, typer.Argument(metavar="[A.B=VALUE]...", help="Changes to the config.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command(epilog="Example: smalti data documents data/demo/raw")
def documents(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder that receives code.jsonl and prose.jsonl.")],
    everything: Annotated[
        bool, typer.Option("--everything", help="Tests too, and packages that not every Python brings along.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Build a small corpus from the installed Python: its library sources (code), docstrings and topics (prose).

    Nothing is downloaded. Docstrings are cut out of the code; a file and its docstrings share the field 'group', so
    that a held-out split by group keeps them together.
    """
    from smalti.base.units import format_bytes
    from smalti.cli.tables import print_json, table
    from smalti.data.documents.installed_python import write_documents

    with ProgressLine() as tell:
        counts = write_documents(output, everything=everything, progress=tell)
    if as_json:
        print_json({"documents": counts.documents, "bytes": counts.n_bytes, "skipped": counts.skipped})
        return
    rows = [
        (f"{output}/{source}.jsonl", f"{n:,}", format_bytes(counts.n_bytes[source]))
        for source, n in counts.documents.items()
    ]
    print(table(("file", "documents", "text"), rows))
    for skipped in counts.skipped:
        print(f"left out, it does not parse: {skipped}")


@app.command(epilog="Example: smalti data curate demo-curate heldout_frac=0.1 --dry-run")
def curate(
    config: _Config,
    overrides: _Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be read.")] = False,
    as_json: _Json = False,
) -> None:
    """Normalise documents, apply quality rules, take out exact duplicates, set held-out documents aside.

    Writes OUTPUT/documents/SOURCE/{train,heldout}.parquet, OUTPUT/drops/SOURCE.parquet (each drop with its rule, reason
    and score), OUTPUT/report.json and report.md. The same command again replaces them with the same.
    """
    from smalti.cli.tables import table
    from smalti.config.curate import CurateConfig
    from smalti.config.load import load
    from smalti.data.prepare.curate.report import COLUMNS, DROP_COLUMNS

    loaded = load(CurateConfig, config, overrides or []).config
    if dry_run:
        _print_inputs(loaded, as_json)
        return
    need_data_extra()
    from smalti.data.prepare.curate.job import curate as run

    with ProgressLine() as tell:
        report = run(loaded, tell)
    drops = ["drops by rule\n" + table(DROP_COLUMNS, report.drop_rows())] if report.drop_rows() else []
    then = (
        f"written to {loaded.output}; next: smalti data dedup CONFIG documents={loaded.output} output=...\n"
        "(or without taking near-duplicates out: smalti data tokenize)"
    )
    _print_report(report, COLUMNS, as_json, below=drops, notes=report.notes(), then=then)


@app.command(epilog="Example: smalti data dedup demo-dedup threshold=0.8 --dry-run")
def dedup(
    config: _Config,
    overrides: _Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: _Json = False,
) -> None:
    """Drop near-duplicates: MinHash proposes pairs, an exact count decides, and each drop names the one that stays.

    Takes and writes folders as 'smalti data curate' does. Held-out documents all stay; training documents that are near
    to one go. Exit code 3: a source lost more than alarm_frac (the result is written), or the self-test failed.
    """
    from smalti.config.dedup import DedupConfig
    from smalti.config.load import load

    loaded = load(DedupConfig, config, overrides or []).config
    need_data_extra()
    if dry_run:
        _print_dedup_plan(loaded, as_json)
        return
    from smalti.data.prepare.dedup.job import dedup as run
    from smalti.data.prepare.dedup.report import COLUMNS

    with ProgressLine() as tell:
        report = run(loaded, tell)
    below = [
        f"{report.selftest_line()}\n"
        f"{report.near_heldout_documents:,} training document(s) went for being near to a held-out one"
    ]
    if report.n_candidates:
        below.insert(0, f"similarity of the {report.n_candidates:,} pairs compared\n{report.histogram_text()}")
    then = f"written to {loaded.output}; next: smalti data tokenize CONFIG documents={loaded.output} output=..."
    _print_report(report, COLUMNS, as_json, below=below, notes=report.notes(), then=then)
    for line in report.alarm_lines():
        print(f"ALARM: {line}", file=sys.stderr)
    if report.alarms:
        raise typer.Exit(3)


@app.command(epilog="Example: smalti data tokenize demo-tokenize output=data/demo/tokens-2")
def tokenize(config: _Config, overrides: _Overrides = None, as_json: _Json = False) -> None:
    """Train a byte-level BPE on the training split (or load a tokenizer), and write documents as token files.

    Writes OUTPUT/tokenizer/ (Hugging Face form) and OUTPUT/SOURCE/{train,heldout}/ with manifest.json and *.tok. The
    same command again replaces them with the same.
    """
    from smalti.config.curate import TokenizeConfig
    from smalti.config.load import load

    loaded = load(TokenizeConfig, config, overrides or []).config
    need_data_extra()
    from smalti.data.prepare.tokenize import COLUMNS
    from smalti.data.prepare.tokenize import tokenize as run

    with ProgressLine() as tell:
        report = run(loaded, tell)
    vocabulary = (
        f"vocabulary of {report.vocab_size:,}; end of document {report.eod_id}; digest {report.tokenizer_digest[:12]}"
    )
    then = f"written to {loaded.output}; look inside: smalti data inspect {loaded.output}"
    _print_report(report, COLUMNS, as_json, below=[vocabulary], notes=report.notes, then=then)


app.command(epilog="Example: smalti data inspect data/demo/tokens/code/train --samples 1")(inspect)
app.command(epilog="Example: smalti data explain runs/demo --step 2 --row 0 --text")(explain)
app.command(epilog="Example: smalti data pack data/demo/tokens/code/train --seq-len 512 --dry-run")(pack)
app.command("to-mds", epilog="Example: smalti data to-mds data/demo/tokens/code/train mds --seq-len 512 --dry-run")(
    to_mds
)


def _print_report(
    report: Any, columns: Sequence[str], as_json: bool, *, below: Sequence[str], notes: Sequence[str], then: str
) -> None:
    """JSON; or the table, the blocks below it, the notes, and what to type next."""
    from smalti.cli.tables import print_json, table

    if as_json:
        print_json(report.as_json())
        return
    print("\n\n".join([table(columns, report.rows()), *below]))
    for note in notes:
        print(f"note: {note}")
    print(f"\n{then}")


def _print_inputs(config: "CurateConfig", as_json: bool) -> None:
    """What ``--dry-run`` answers: the files of each source."""
    from smalti.base.units import format_bytes
    from smalti.cli.tables import print_json, table
    from smalti.data.documents.files import find_files

    found = {name: find_files(source.path, source.include) for name, source in sorted(config.sources.items())}
    sizes = {name: sum(file.n_bytes for file in files.files) for name, files in found.items()}
    if as_json:
        listed = {name: [file.path for file in files.files] for name, files in found.items()}
        print_json({"output": config.output, "files": listed, "bytes": sizes})
        return
    rows = [
        (name, f"{len(files.files):,}", format_bytes(sizes[name]), ", ".join(config.sources[name].rules))
        for name, files in found.items()
    ]
    print(table(("source", "files", "on disk", "rules"), rows))
    for name, files in found.items():
        for suffix, count in files.skipped.items():
            print(f"note: {name}: {count} file(s) '{suffix}' would be passed over, their kind is not known")
    print(f"nothing was written; without --dry-run the result goes to {config.output}")


def _print_dedup_plan(config: "DedupConfig", as_json: bool) -> None:
    """What ``dedup --dry-run`` answers: the documents, and how likely MinHash proposes pairs of some similarities."""
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import print_json, table
    from smalti.data.prepare.dedup.corpus import check_score_field, read_corpus, text_bytes

    corpus = read_corpus(config.documents)
    check_score_field(corpus, config.score_field)
    found = {
        f"{part.source}/{part.split}": {"documents": part.n_documents, "bytes": text_bytes(part)}
        for part in corpus.parts
    }
    similarities = sorted({config.threshold, *(value / 20 for value in range(8, 20))})
    chances = {f"{value:.2f}": 1 - (1 - value**config.rows) ** config.bands for value in similarities}
    if as_json:
        print_json({"output": config.output, "runner": config.runner, "splits": found, "proposed_frac": chances})
        return
    rows = [(name, f"{counts['documents']:,}", format_bytes(counts["bytes"])) for name, counts in found.items()]
    print(table(("split", "documents", "text"), rows))
    print(
        f"\na pair is compared with the probability 1 - (1 - s^{config.rows})^{config.bands} at Jaccard similarity s:"
    )
    print(table(("s", "compared"), [(value, format_frac(chance)) for value, chance in chances.items()]))
    print(f"near: {config.threshold} or more of the shingles of {config.shingle_words} words; runner: {config.runner}")
    print(f"nothing was written; without --dry-run the result goes to {config.output}")
