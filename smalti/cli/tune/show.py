"""``smalti tune show``: prints examples token by token, with those in the loss marked."""

import sys
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smalti.cli.options import Json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from smalti.data.examples import Example
    from smalti.data.tokenizer.encode import Tokenizer


def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A .jsonl or .parquet file of chats, or a folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="A.B=VALUE", help="Fields of the section tune.examples: 'columns.prompt=question'."),
    ] = None,
    tokenizer: Annotated[
        str, typer.Option(metavar="FOLDER", help="The model or tokenizer folder.", show_default=False)
    ] = "",
    template: Annotated[
        str, typer.Option(help="The chat template: model (the folder's own), chatml, none, or a .jinja file.")
    ] = "model",
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many examples; all rows are checked.")] = 3,
    color: Annotated[
        Literal["auto", "always", "never"],
        typer.Option(help="Mark tokens in the loss by colour, or by brackets; auto: colour on a terminal."),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Print examples token by token, with the tokens in the loss marked, and what becomes of all rows.

    Blanks are shown as they are, a line end as ⏎. The first tokens of an answer and its end of turn are what a mask
    has wrong most often: they are worth a look before a training run.
    """
    from smalti.base.env import plain_output
    from smalti.base.errors import UserError
    from smalti.cli.extras import need
    from smalti.cli.progress import ProgressLine
    from smalti.cli.tables import pairs, print_json
    from smalti.config.examples import ExamplesConfig
    from smalti.config.load import from_dict
    from smalti.data.tokenizer.encode import load_tokenizer
    from smalti.tune.chats.examples import examples_of
    from smalti.tune.chats.report import ExamplesReport

    need("data", "smalti tune", "pyarrow", "tokenizers")
    if not tokenizer:
        raise UserError("no tokenizer is named", hint=f"smalti tune show {file} --tokenizer MODEL_FOLDER")
    values = {"files": [file], "template": template}
    changes = [override.removeprefix("tune.examples.") for override in overrides or []]  # as recipes have them
    config = from_dict(ExamplesConfig, values, "smalti tune show", changes).config
    report = ExamplesReport()
    encoder = load_tokenizer(tokenizer)
    with_color = sys.stdout.isatty() and not plain_output() if color == "auto" else color == "always"
    examples = []
    with ProgressLine("rows") as progress:
        for number, (split, example) in enumerate(examples_of(config, tokenizer, report, progress=progress)):
            if number < limit and as_json:
                examples.append(_json(split, example, encoder))
            elif number < limit:
                _print(split, example, encoder, with_color)
    if as_json:
        return print_json({"examples": examples, "report": report.to_json()})
    if not with_color:
        print("[[ ]]: in the loss; |: between tokens\n")
    print(pairs(report.rows_of_table()))


def _print(split: str, example: "Example", encoder: "Tokenizer", with_color: bool) -> None:
    print(f"{_visible(example.id)} ({split}){_values(example)}")
    names = ("chosen: ", "rejected: ") if len(example.sequences) == 2 else ("",)
    for name, (ids, mask) in zip(names, example.sequences, strict=True):
        print(f"  {name}{len(ids):,} tokens, {sum(mask):,} in the loss")
        print(_marked(ids, mask, encoder, with_color), end="\n\n", flush=True)


def _values(example: "Example") -> str:
    return "".join(f", {name} {value:g}" for name, value in example.values.items())


def _texts(ids: "Sequence[int]", encoder: "Tokenizer") -> list[str]:
    """Return the text of each token; bytes of an incomplete character are shown as U+FFFD."""
    return [encoder.decode([token], skip_special=False) for token in ids]


def _marked(ids: "Sequence[int]", mask: "Sequence[int]", encoder: "Tokenizer", with_color: bool) -> str:
    texts = [_visible(text) for text in _texts(ids, encoder)]
    if with_color:
        # Neighbouring tokens have different shades; green is in the loss, grey is not.
        shades = {True: ("30;42", "30;102"), False: ("90", "37")}
        parts = [
            f"\x1b[{shades[bool(flag)][n % 2]}m{text}\x1b[0m"
            for n, (text, flag) in enumerate(zip(texts, mask, strict=True))
        ]
        return "".join(parts).replace("⏎", "⏎\n")
    runs: list[tuple[int, list[str]]] = []
    for text, flag in zip(texts, mask, strict=True):
        if not runs or runs[-1][0] != flag:
            runs.append((flag, []))
        runs[-1][1].append(text)
    return "".join(f"[[{'|'.join(run)}]]" if flag else "|".join(run) for flag, run in runs).replace("⏎", "⏎\n")


def _visible(text: str) -> str:
    """Return the text without characters that a terminal would act on."""
    return "".join(
        "⏎" if character == "\n" else character if character.isprintable() else repr(character)[1:-1]
        for character in text
    )


def _json(split: str, example: "Example", encoder: "Tokenizer") -> dict[str, Any]:
    sequences = [
        {"ids": list(ids), "mask": list(mask), "tokens": _texts(ids, encoder)} for ids, mask in example.sequences
    ]
    return {"id": example.id, "split": split, "values": dict(example.values), "sequences": sequences}
