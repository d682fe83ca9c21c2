"""``smalti chat``: talk to an exported model in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.sampling import SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti chat runs/demo --prompt 'def main(' --max-tokens 64")
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, or a Hugging Face folder.")],
    prompt: Annotated[str | None, typer.Option(help="Answer this one prompt and leave.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 draws as the model predicts.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Draw among the likeliest tokens of this total probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Draw among this many likeliest tokens; 0 puts no bound.")] = 0,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal answers.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute in fp32 or bf16.")] = "fp32",
) -> None:
    """Continue text with an exported model, streaming. Without --prompt: a prompt on a terminal, else reads stdin.

    Ctrl-C stops an answer, Ctrl-D leaves. A base model continues what it is given; it does not answer questions.
    """
    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.sampling import SamplingParams
    from smalti.serve.folders import find

    params = SamplingParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()))
    engine = Engine.from_folder(find(model).folder, dtype=dtype)
    if prompt is not None:
        _show(engine.stream(prompt, params))
    elif not sys.stdin.isatty():
        _show(engine.stream(sys.stdin.read().removesuffix("\n"), params))
    else:
        _converse(engine, params)


def _converse(engine: "Engine", params: "SamplingParams") -> None:
    """Read a prompt, stream its continuation, until Ctrl-D. Each answer gets the next seed."""
    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() a history and an editable line)
    print(f"{engine.name}: a base model; it continues your text and remembers nothing of the text before.")
    print("End a line with \\ to write another. Ctrl-C stops an answer, Ctrl-D leaves.")
    while True:
        try:
            prompt = _read_prompt()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not prompt:
            continue
        try:
            _show(engine.stream(prompt, params))
        except KeyboardInterrupt:
            print("\n(stopped)")
        params = replace(params, seed=params.seed + 1)


def _read_prompt() -> str:
    lines = [input("\n> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)


def _show(pieces: Iterator[str]) -> None:
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
