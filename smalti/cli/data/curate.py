"""``smalti data curate``: raw documents to clean ones."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.data.arguments import Config, Json, Overrides
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine

if TYPE_CHECKING:
    from smalti.config.curate import CurateConfig


def curate(
    config: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list the files that would be read.")] = False,
    as_json: Json = False,
) -> None:
    """Normalise documents, apply quality rules, drop exact duplicates, and set held-out documents aside.

    Writes OUTPUT/documents/SOURCE/{train,heldout}.parquet, OUTPUT/drops/SOURCE.parquet (each drop with its rule, reason
    and score), OUTPUT/report.json and report.md. Running it again replaces them with identical files.
    """
    from smalti.cli.data.report import print_report
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

    with ProgressLine() as progress:
        report = run(loaded, progress)
    drops = report.drop_rows()
    next_step = (
        f"written to {loaded.output}; next: smalti data dedup CONFIG documents={loaded.output} output=...\n"
        "(or smalti data tokenize, if near-duplicates may stay)"
    )
    print_report(
        report,
        COLUMNS,
        as_json,
        blocks=["drops by rule\n" + table(DROP_COLUMNS, drops)] if drops else [],
        notes=report.notes(),
        next_step=next_step,
    )


def _print_inputs(config: "CurateConfig", as_json: bool) -> None:
    """Print the files of each source, for ``--dry-run``."""
    from smalti.base.units import format_bytes, format_quantity
    from smalti.cli.tables import print_json, table
    from smalti.data.documents.files import find_files

    sources = {name: find_files(source.path, source.include) for name, source in sorted(config.sources.items())}
    sizes = {name: sum(file.n_bytes for file in files.files) for name, files in sources.items()}
    if as_json:
        paths = {name: [file.path for file in files.files] for name, files in sources.items()}
        print_json({"output": config.output, "files": paths, "bytes": sizes})
        return
    rows = [
        (name, f"{len(files.files):,}", format_bytes(sizes[name]), ", ".join(config.sources[name].rules))
        for name, files in sources.items()
    ]
    print(table(("source", "files", "on disk", "rules"), rows))
    for name, files in sources.items():
        for suffix, count in files.skipped.items():
            print(f"note: {name}: {format_quantity(count, 'file')} '{suffix}' would be skipped: unknown kind")
    print(f"nothing was written; without --dry-run the result goes to {config.output}")
