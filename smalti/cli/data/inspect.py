"""``smalti data inspect``: statistics and samples of a folder of documents or tokens."""

from typing import Annotated, Any

import typer

from smalti.cli.data.arguments import Fields, Json
from smalti.cli.extras import need_data_extra


def inspect(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="Tokens in any format, or the output of curate, dedup or tokenize.")
    ],
    fields: Fields = None,
    samples: Annotated[int, typer.Option(min=0, help="Number of documents to print of each part.")] = 2,
    tokenizer: Annotated[
        str | None, typer.Option(help="The tokenizer that wrote the tokens; absent: the one beside them.")
    ] = None,
    limit_tokens: Annotated[
        int, typer.Option(min=1, help="Read about this many tokens of each part, evenly spaced.")
    ] = 100_000_000,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.svg", help="Plot the share of tokens in long documents.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the manifest, document lengths, statistics for each context length, and sample documents.

    For an output of curate or dedup, also prints the drops by rule, with ids and reasons of some documents; all drops
    are in FOLDER/drops/SOURCE.parquet.

    For each context length L: "in longer" is the share of tokens in documents of L tokens or more. "seen" is the mean
    number of tokens of the same document before a token in its row. "cut" is the share of documents that are split
    over rows. Both are given for concat (rows of L tokens cut from concatenated documents; the mean over all places of
    the first cut) and for best-fit (only documents longer than L are cut, every L tokens).
    """
    from smalti.cli.plan.plot_file import require_svg
    from smalti.cli.tables import print_json

    require_svg(plot)
    need_data_extra()
    from smalti.data.prepare.inspect import inspect_folder

    values = inspect_folder(
        folder, options=fields or [], tokenizer=tokenizer, n_samples=samples, limit_tokens=limit_tokens
    )
    if plot is not None:
        _write_plot(plot, values["parts"])
    if as_json:
        print_json(values)
        return
    blocks = [_part_text(part) for part in values["parts"]]
    if values.get("drops"):
        blocks.append(_drops_text(values["drops"]))
    print("\n\n".join(blocks))


def _part_text(part: dict[str, Any]) -> str:
    from smalti.cli.tables import pairs

    blocks = [f"== {part['name']}"]
    if "manifest" in part:
        blocks.append(pairs([(key, _plain(value)) for key, value in part["manifest"].items()]))
    else:
        counts = part["counts"]
        blocks.append(pairs([(f"{a} {b}", f"{n:,}") for a in ("documents", "bytes") for b, n in counts[a].items()]))
    lengths = part["lengths"]
    if lengths["documents"]:
        shown = ", ".join(f"{key} {lengths[key]:,}" for key in ("mean", "median", "p90", "longest"))
        blocks.append(f"document length in {lengths['unit']}: {shown}\n" + _histogram(lengths["histogram"]))
    if part.get("contexts"):
        blocks.append(_contexts_text(part["contexts"]))
    if "note" in part:
        blocks.append(f"note: {part['note']}")
    blocks += [_sample_text(sample) for sample in part["samples"]]
    return "\n\n".join(blocks)


def _drops_text(drops: list[dict[str, Any]]) -> str:
    from smalti.cli.tables import table

    keys = ("source", "split", "rule")
    rows = [(*(drop[key] for key in keys), f"{drop['documents']:,}") for drop in drops]
    blocks = ["== drops", table((*keys, "documents"), rows)]
    for drop in drops:
        lines = [f"   | {sample['id']}: {sample['reason'] or 'no reason recorded'}" for sample in drop["samples"]]
        if lines:
            blocks.append("\n".join([f"-- {drop['source']}/{drop['split']}, {drop['rule']}", *lines]))
    return "\n\n".join(blocks)


def _contexts_text(rows: list[dict[str, Any]]) -> str:
    from smalti.base.units import format_frac
    from smalti.cli.tables import table

    head = ("context", "in longer", "seen, concat", "seen, best-fit", "cut, concat", "cut, best-fit")
    cells = [
        (
            f"{row['context_tokens']:,}",
            format_frac(row["in_long_documents_frac"]),
            f"{row['seen_concat_tokens']:,.0f}",
            f"{row['seen_best_fit_tokens']:,.0f}",
            format_frac(row["cut_concat_frac"]),
            format_frac(row["cut_best_fit_frac"]),
        )
        for row in rows
    ]
    return "by context length\n" + table(head, cells)


def _write_plot(path: str, parts: list[dict[str, Any]]) -> None:
    """Plot the curves of the parts. Raises UserError if there are none."""
    from smalti.base import store
    from smalti.base.chart import Series, line_chart, standalone
    from smalti.base.errors import UserError

    curves = [(part["name"], part["curve"]) for part in parts if part.get("curve")]
    if not curves:
        raise UserError("--plot needs tokens with known document ends, and there are none", hint="leave --plot out")
    svg = line_chart(
        [Series(name, curve["tokens_in_document"], curve["in_longer_frac"]) for name, curve in curves],
        title="Share of tokens in documents of at least this length",
        x_label="document length, tokens",
        log_x=True,
        from_zero=True,
        format_y=lambda value: f"{value:.0%}",
    )
    store.write_text(path, standalone(svg))


def _histogram(bins: list[dict[str, int]]) -> str:
    widest = max(entry["documents"] for entry in bins)
    labels = [f"{entry['from']:,} - {entry['to']:,}" for entry in bins]
    width = max(map(len, labels))
    lines = []
    for label, entry in zip(labels, bins, strict=True):
        bar = "#" * -(-40 * entry["documents"] // widest)
        lines.append(f"  {label:>{width}}  {entry['documents']:>9,}  {bar}".rstrip())
    return "\n".join(lines)


def _sample_text(sample: dict[str, Any]) -> str:
    size = f"{sample['n_tokens']:,} tokens" if "n_tokens" in sample else f"{sample['id']}, {sample['n_bytes']:,} bytes"
    text = sample.get("text", str(sample.get("ids", ""))[:400])
    lines = text[:400].splitlines()[:10]
    name = "beginning" if sample.get("document") is None else f"document {sample['document']:,}"
    return "\n".join([f"-- {name} ({size})", *(f"   | {line}" for line in lines)])


def _plain(value: Any) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else str(value)
