"""``smalti data diff``: how two versions of a built set differ."""

from typing import Annotated, Any

import typer

from smalti.cli.data.arguments import Json
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="The output of a build.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The output of another build, of the same sources.")],
    examples: Annotated[int, typer.Option(min=0, help="Number of ids to print of each row.")] = 3,
    as_json: Json = False,
) -> None:
    """Print which documents B has added, removed or changed, by source, step and rule, with bytes.

    Of a removed document the rule is the one that drops it in B, of an added document the one that had dropped it in
    A. A document is its source and id. 'smalti data why' has the details of one.
    """
    from smalti.cli.tables import print_json

    need_data_extra()
    from smalti.data.build.diff import diff as compare

    with ProgressLine() as progress:
        values = compare(first, second, examples, progress)
    print_json(values) if as_json else print(_text(values))


def _text(values: dict[str, Any]) -> str:
    from smalti.base.units import format_bytes
    from smalti.cli.tables import table
    from smalti.track.compare.comparison import value_text

    sets = [
        (name, values[key]["folder"], f"{values[key]['documents']:,}", format_bytes(values[key]["bytes"]))
        for name, key in (("A", "first"), ("B", "second"))
    ]
    blocks = [table(("", "folder", "documents", "text"), sets)]
    if values["recipe"]:
        rows = [(name, *(value_text(value, longest=60) for value in pair)) for name, pair in values["recipe"].items()]
        blocks.append(table(("recipe", "A", "B"), rows))
    names = ("unchanged", "changed", "added", "removed")
    totals = [(name, f"{count['documents']:,}", f"{count['bytes']:,}") for name in names
              for count in [values["totals"][name]]]  # fmt: skip
    blocks.append(table(("", "documents", "bytes"), totals))
    heads = {"removed": "removed: dropped in B by", "added": "added: dropped in A by", "changed": "changed: what"}
    for kind, head in heads.items():
        rows = [
            (row["step"], row["rule"], row["source"], f"{row['documents']:,}", f"{row['bytes']:,}",
             ", ".join(row["examples"]))
            for row in values[kind]
        ]  # fmt: skip
        if rows:
            blocks.append(table((head, "rule", "source", "documents", "bytes", "such as"), rows))
    return "\n\n".join(blocks)
