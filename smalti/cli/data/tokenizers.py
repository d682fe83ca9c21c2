"""``smalti data tokenizers``: compare tokenizers on one's own documents."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from smalti.cli.extras import need
from smalti.cli.options import Json

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True, help="Compare tokenizers.")


@app.callback()
def _tokenizers() -> None:
    """Compare tokenizers on documents."""


@app.command(epilog="Example: smalti data tokenizers compare runs/demo data/demo/tokens --on data/demo/raw")
def compare(
    tokenizers: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]TOKENIZER...",
            help="tokenizer.json, the folder of a model, run or tokens, or a tiktoken rank file.",
        ),
    ],
    on: Annotated[
        list[str],
        typer.Option(
            "--on",
            metavar="[NAME=]PATH",
            help="Documents: a file or folder, a group each; of a folder of folders each folder. Repeatable.",
        ),
    ],
    by_language: Annotated[
        bool, typer.Option("--by-language", help="Group the documents by their language in place of their path.")
    ] = False,
    text_field: Annotated[str, typer.Option(help="Field with the text, in JSONL and Parquet.")] = "text",
    limit_bytes: Annotated[
        int, typer.Option(min=1000, help="Of a larger group a sample of about this size is used.")
    ] = 8_000_000,
    plot: Annotated[str | None, typer.Option(metavar="FILE.svg", help="Plot bytes per token by group.")] = None,
    as_json: Json = False,
) -> None:
    """Compare tokenizers on the same documents: bytes per token, cost, numbers, indentation, exactness.

    cost: tokens, relative to the first tokenizer; what the same text costs in training, in the context and in answers.
    Tokens per word, or per character in scripts without blanks between words. "±" is half of a 95 % interval over
    documents. inexact: documents that do not decode to the same text.
    """
    from smalti.cli.plan.plot_file import require_svg
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import print_json

    require_svg(plot)
    need("data", "smalti data", "pyarrow", "tokenizers")
    from smalti.data.prepare.tokenizers.compare import compare_tokenizers

    with ProgressLine(rate=True) as progress:
        values = compare_tokenizers(
            tokenizers,
            on,
            text_field=text_field,
            limit_bytes=limit_bytes,
            group_of=_language if by_language else None,
            progress=progress,
        )
    if plot is not None:
        _write_plot(plot, values)
    print_json(values) if as_json else print(_text(values))


def _language(file: str, text: str) -> str:
    from smalti.data.build.clean.language import identify
    from smalti.data.documents.files import is_code

    return "code" if is_code(file) else identify(text)[0]


def _text(values: Mapping[str, Any]) -> str:
    from smalti.cli.tables import table
    from smalti.data.prepare.tokenizers.probes import INDENTS

    head = ("group", "documents", "tokenizer", "tokens", "bytes/token", "", "tokens/word", "cost", "", "inexact")
    rows = []
    for name, group in values["groups"].items():
        unit = "" if group["unit"] == "word" else " (per character)"
        for number, (tokenizer, score) in enumerate(group["scores"].items()):
            rows.append(
                (
                    *((name + unit, f"{group['documents']:,}") if number == 0 else ("", "")),
                    tokenizer,
                    f"{score['tokens']:,}",
                    f"{score['bytes_per_token']:.3f}",
                    _half(score["bytes_per_token_interval"]),
                    f"{score['tokens_per_unit']:.3f}",
                    f"{score['relative_cost']:.3f}",
                    _half(score["relative_cost_interval"]) if number else "",
                    f"{score['inexact_documents']:,}",
                )
            )
    columns = ("tokenizer", "entries", "numbers", "1234567", "tokens/digit", "longest blanks",
               f"tokens of {', '.join(map(str, INDENTS))} blanks")  # fmt: skip
    properties = [
        (
            name,
            f"{each['vocab_size']:,}",
            each["digits"],
            "|".join(each["pieces"]["1234567"]),
            f"{each['tokens_per_digit']:.2f}",
            str(each["longest_blank_run"]),
            ", ".join(map(str, each["indent_tokens"].values())),
        )
        for name, each in values["tokenizers"].items()
    ]
    return "\n".join([table(head, rows), "", table(columns, properties), *_notes(values)])


def _notes(values: Mapping[str, Any]) -> list[str]:
    notes = []
    for name, each in values["tokenizers"].items():
        if each["changed"]:
            notes.append(f"note: {name} does not give back: {', '.join(each['changed'])}")
    for group, entry in values["groups"].items():
        for name, score in entry["scores"].items():
            if score["first_difference"]:
                text, decoded = score["first_difference"]["text"], score["first_difference"]["decoded"]
                changed = f"{score['inexact_documents']:,} of {entry['documents']:,} documents"
                notes.append(f"note: {group}: {name} loses text of {changed}: {decoded!a} of {text!a}")
    if len(notes) > 0:
        notes.append("note: where text is lost, tokens and cost are of less text: they cannot be compared")
    return ["", *notes] if notes else []


def _half(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f"±{(interval[1] - interval[0]) / 2:.3f}"


def _write_plot(path: str, values: Mapping[str, Any]) -> None:
    """Write a chart of bars for each group, all on one scale."""
    from smalti.base import store
    from smalti.base.chart import Bar, bar_chart, column, standalone

    groups = values["groups"]
    scores = [score for group in groups.values() for score in group["scores"].values()]
    # A tokenizer of unknown words has few tokens: others would be points on its scale.
    exact = [score for score in scores if not score["inexact_documents"]] or scores
    high = 1.1 * max(max(score["bytes_per_token"], *(score["bytes_per_token_interval"] or (0,))) for score in exact)
    charts = [
        bar_chart(
            [
                Bar(
                    name,
                    min(score["bytes_per_token"], high),
                    score["bytes_per_token_interval"] if score["bytes_per_token"] <= high else None,
                    text=f"{score['bytes_per_token']:.2f}, "
                    + ("loses text" if score["inexact_documents"] else f"cost {score['relative_cost']:.2f}"),
                    colour=colour,
                )
                for colour, (name, score) in enumerate(group["scores"].items())
            ],
            title=f"{group_name}: bytes per token",
            high=1.15 * high,
        )
        for group_name, group in groups.items()
    ]
    store.write_text(path, standalone(column(charts, title="Tokenizers compared")))
