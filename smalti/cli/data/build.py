"""``smalti data build``: a recipe from raw documents to a clean, deduplicated set."""

from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.data.arguments import Config, Json, Overrides
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine

if TYPE_CHECKING:
    from smalti.config.build import BuildConfig


def build(
    recipe: Config,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be read.")] = False,
    as_json: Json = False,
) -> None:
    """Extract, clean, filter and deduplicate documents; the same command again does only what changed.

    Writes OUTPUT/documents/SOURCE/{train,heldout}.parquet (id, text, source ...), OUTPUT/drops/SOURCE.parquet (each
    dropped document with rule, reason and score), OUTPUT/report.json and report.md, all at once; with 'tokenize' in the
    recipe token files too. A killed build resumes, and gives the same bytes.
    """
    from smalti.cli.data.report import print_report
    from smalti.cli.tables import table
    from smalti.config.build import BuildConfig
    from smalti.config.load import load

    config = load(BuildConfig, recipe, overrides or []).config
    need_data_extra()
    if dry_run:
        _print_plan(config, as_json)
        return
    from smalti.data.build.job import build as run
    from smalti.data.build.report import COLUMNS, DROP_COLUMNS
    from smalti.data.build.tokens import build_tokens, check_tokens
    from smalti.data.prepare.tokenize import COLUMNS as TOKEN_COLUMNS

    check_tokens(config)
    with ProgressLine(rate=True) as progress:
        report = run(config, progress)
        tokens = build_tokens(config, progress)
    drops = report.drop_rows()
    blocks = ["drops by rule\n" + table(DROP_COLUMNS, drops)] if drops else []
    notes = report.notes()
    next_step = f"next: smalti data tokenize CONFIG documents={config.output} output=..."
    if tokens is not None:
        blocks.append("tokens\n" + table(TOKEN_COLUMNS, tokens.rows()))
        notes += tokens.notes
    if config.tokenize is not None:
        next_step = f"tokens: {config.tokenize.output}; look inside: smalti data inspect {config.tokenize.output}"
    state = "written to" if report.is_new else "nothing changed; up to date:"
    next_step = f"{state} {config.output}; {next_step}"
    print_report(report, COLUMNS, as_json, blocks=blocks, notes=notes, next_step=next_step)


def _print_plan(config: "BuildConfig", as_json: bool) -> None:
    """Print the files of each source and the folders, for ``--dry-run``."""
    from smalti.base.units import format_bytes
    from smalti.cli.tables import print_json, table
    from smalti.data.build.inputs import find_inputs
    from smalti.data.build.job import work_folder

    sources = find_inputs(config.inputs)
    sizes = {name: sum(file.n_bytes for file in files.files) for name, files in sources.items()}
    if as_json:
        paths = {name: [file.path for file in files.files] for name, files in sources.items()}
        print_json({"output": config.output, "work": str(work_folder(config)), "files": paths, "bytes": sizes})
        return
    rows = [(name, f"{len(files.files):,}", format_bytes(sizes[name])) for name, files in sources.items()]
    print(table(("source", "files", "on disk"), rows))
    print(f"steps: {work_folder(config)}")
    print(f"nothing was written; without --dry-run the result goes to {config.output}")
