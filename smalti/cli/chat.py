"""``smalti chat``: generates text with an exported model in the terminal."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from smalti.cli.options import Model

if TYPE_CHECKING:
    from smalti.data.tokenizer.chat import ChatFormat
    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.sampling import SamplingParams

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: smalti chat runs/demo --prompt 'def main(' --max-tokens 64")
def chat(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="Answer this one prompt and exit.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer, in tokens.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 is greedy; 1 samples as the model predicts.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 0.95,
    top_k: Annotated[int, typer.Option(help="Sample from this many likeliest tokens; 0: no limit.")] = 0,
    seed: Annotated[int, typer.Option(help="Random seed; equal seeds give equal answers.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="End the answer before this text; may be repeated.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Folder of an adapter, or of the run that trained it.")] = None,
    dtype: Annotated[str, typer.Option(help="Compute in fp32 or bf16.")] = "fp32",
    save: Annotated[
        bool, typer.Option("--save", help="Append prompt and answer to RUN/samples.jsonl; the run's report shows them.")
    ] = False,
) -> None:
    """Generate text with an exported model, streaming. Without --prompt: interactive on a terminal, else reads stdin.

    Ctrl-C stops an answer, Ctrl-D exits. A base model continues the text and does not answer questions. A model or
    adapter with a chat template is prompted with it, and the conversation keeps its turns.
    """
    from smalti.data.tokenizer.chat import load_chat
    from smalti.serve.adapters import load_chats
    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.sampling import SamplingParams
    from smalti.serve.engine.scheduler import Limits
    from smalti.serve.folders import find, find_adapter

    with _as_options():
        params = SamplingParams(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()))
    folder = find(model)
    with _utf8():
        if prompt is None and not sys.stdin.isatty():
            prompt = sys.stdin.read().removesuffix("\n")
        "".join([prompt or "", *params.stop]).encode()
    _can_save(save, folder.run_folder, prompt)
    # One answer at a time, so batch invariance needs no spare rows.
    adapters = {"adapter": find_adapter(adapter)} if adapter else {}
    engine = Engine.from_folder(folder.folder, dtype=dtype, limits=Limits(step_rows=1), adapters=adapters)
    base_form = load_chat(folder.folder)
    form = load_chats(adapters, base_form).get("adapter", base_form)
    if prompt is None:
        _converse(engine, params, form)
        return
    completion = _show(_stream(engine, _model_input(engine, form, [{"role": "user", "content": prompt}]), params))
    if save:
        _save(f"{folder.run_folder}/samples.jsonl", prompt, completion, params, is_chat=bool(form.source))


@contextmanager
def _as_options() -> Iterator[None]:
    """Name the option instead of the field in errors of values out of range."""
    from smalti.base.errors import UserError

    try:
        yield
    except UserError as error:
        field, _, rest = error.message.partition("=")
        option = f"--{field.replace('_', '-')}"
        raise UserError(
            f"{option} {rest}", allowed=error.allowed, hint=f"leave {option} out for its default"
        ) from error


@contextmanager
def _utf8() -> Iterator[None]:
    """Raise UserError for text that is not UTF-8: Python passes such bytes on as lone surrogates."""
    from smalti.base.errors import UserError

    try:
        yield
    except UnicodeError as error:
        raise UserError(
            "the prompt or a --stop is not UTF-8",
            allowed="text in UTF-8",
            hint="if it is Latin-1: iconv -f LATIN1 -t UTF-8 FILE | smalti chat MODEL",
        ) from error


def _can_save(save: bool, run_folder: str | None, prompt: str | None) -> None:
    from smalti.base.errors import UserError

    if save and (run_folder is None or prompt is None):
        raise UserError(
            "--save appends the answer to one prompt to a run's folder",
            allowed="a RUN and a prompt",
            hint="smalti chat runs/demo --prompt 'import os' --save",
        )


def _save(path: str, prompt: str, completion: str, params: "SamplingParams", *, is_chat: bool) -> None:
    from smalti.base.clock import utc_text
    from smalti.track.line_file import LineFile

    file = LineFile(path)
    file.write(
        {
            "time": utc_text(),
            "prompt": prompt,
            "completion": completion,
            "temperature": params.temperature,
            "seed": params.seed,
            "chat": is_chat,
        }
    )
    file.close()


def _model_input(engine: "Engine", form: "ChatFormat", messages: list[dict[str, str]]) -> str | list[int]:
    """Return the conversation in the model's chat template, or for a base model only the last text."""
    if not form.source:
        return messages[-1]["content"]
    return form.prompt_ids(messages, engine.tokenizer, engine.begin_id)


def _stream(engine: "Engine", prompt: str | list[int], params: "SamplingParams") -> Iterator[str]:
    """Return the stream of an answer, by the engine's adapter if it has one."""
    from smalti.serve.engine.offline import stream

    return stream(engine, prompt, params, next(iter(engine.adapters), None))


def _converse(engine: "Engine", params: "SamplingParams", form: "ChatFormat") -> None:
    """Read prompts and stream answers until Ctrl-D, each answer with the next seed.

    A stopped answer is dropped with its prompt, and so is a prompt that does not fit the model's context.
    """
    from smalti.base.errors import UserError

    with suppress(ImportError):
        import readline  # noqa: F401 (gives input() a history and an editable line)
    if form.source:
        print(f"{engine.name}: a chat model; it keeps this conversation.")
    else:
        print(f"{engine.name}: a base model; it continues each text on its own.")
    print("End a line with \\ to continue it on the next. Ctrl-C stops an answer, Ctrl-D exits.")
    messages: list[dict[str, str]] = []
    while True:
        try:
            with _utf8():
                prompt = _read_prompt()
                prompt.encode()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            continue
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if not prompt:
            continue
        conversation = [*messages, {"role": "user", "content": prompt}]
        try:
            answer = _show(_stream(engine, _model_input(engine, form, conversation), params))
            messages = [*conversation, {"role": "assistant", "content": answer}]
        except KeyboardInterrupt:
            print("\n(stopped)")
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
        params = replace(params, seed=params.seed + 1)


def _read_prompt() -> str:
    lines = [input("\n> ")]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input("… "))
    return "\n".join(lines)


def _show(pieces: Iterator[str]) -> str:
    """Write the pieces as they come; returns them joined."""
    shown = []
    for piece in pieces:
        shown.append(piece)
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return "".join(shown)
