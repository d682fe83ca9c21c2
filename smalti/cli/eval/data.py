"""``smalti eval data``: the files of the Gauntlet in a folder."""

from typing import Annotated

import typer

from smalti.cli.options import Json
from smalti.cli.tables import print_json, print_table


def data(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="Folder with CATEGORY/FILE.jsonl, or FILE.jsonl.")],
    check: Annotated[
        bool, typer.Option("--check", help="Exit 3 if a file is missing or is not the published one.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the file of each benchmark of the Gauntlet: digest, rows, licence, and what is missing."""
    from smalti.base.errors import CheckFailed, DataError
    from smalti.base.store import exists
    from smalti.evals.gauntlet import files

    if not exists(folder):
        raise DataError(f"there is no folder {folder}", hint=f"get the files from {files.SOURCE}")
    checks = files.check(folder)
    if as_json:
        print_json({"files": [entry.row() for entry in checks], "source": files.SOURCE})
    else:
        rows = [
            (
                entry.benchmark.name,
                entry.path or entry.benchmark.path,
                entry.state,
                "-" if entry.n_rows is None else f"{entry.n_rows:,}",
                entry.sha256[:16] if entry.sha256 else "-",
                entry.benchmark.licence,
            )
            for entry in checks
        ]
        print_table(("task", "file", "state", "rows", "sha256", "licence"), rows, empty="")
        print("\nThe benchmarks of programming are listed, and run when there is a sandbox for programs.")
        if any(entry.path is None for entry in checks):
            print(f"Missing files: {files.SOURCE}")
    wrong = [entry.benchmark.path for entry in checks if entry.state in ("missing", "different")]
    if check and wrong:
        raise CheckFailed(
            f"{len(wrong)} of {len(checks)} files are missing or different: {', '.join(wrong)}",
            hint=f"get them from {files.SOURCE}",
        )
