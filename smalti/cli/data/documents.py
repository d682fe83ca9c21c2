"""``smalti data documents``: a small corpus from the installed Python."""

from typing import Annotated

import typer

from smalti.cli.data.arguments import Json
from smalti.cli.progress import ProgressLine


def documents(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="Folder for code.jsonl and prose.jsonl.")],
    everything: Annotated[
        bool, typer.Option("--everything", help="Include tests, and packages that some Pythons lack.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Build a small corpus from the installed Python: library sources (code), docstrings and help topics (prose).

    Nothing is downloaded. Docstrings are cut out of the code; a file and its docstrings share the field 'group', so
    that a held-out split by group keeps them together.
    """
    from smalti.base.units import format_bytes
    from smalti.cli.tables import print_json, table
    from smalti.data.documents.installed_python import write_documents

    with ProgressLine() as progress:
        counts = write_documents(output, everything=everything, progress=progress)
    if as_json:
        print_json({"documents": counts.documents, "bytes": counts.n_bytes, "skipped": counts.skipped})
        return
    rows = [
        (f"{output}/{source}.jsonl", f"{n:,}", format_bytes(counts.n_bytes[source]))
        for source, n in counts.documents.items()
    ]
    print(table(("file", "documents", "text"), rows))
    for skipped in counts.skipped:
        print(f"note: skipped {skipped}: it does not parse")
