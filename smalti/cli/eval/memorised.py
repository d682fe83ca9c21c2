"""``smalti eval memorised``: how often a model repeats its training text token for token."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.base.units import format_count
from smalti.cli.options import Json, Model
from smalti.cli.progress import ProgressLine
from smalti.cli.tables import print_json, table

if TYPE_CHECKING:
    from smalti.data.sources.source import Int64s, Source
    from smalti.serve.folders import ModelFolder


def memorised(
    model: Model,
    windows: Annotated[int, typer.Option(min=1, help="Windows of training documents, and of held-out ones.")] = 1000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="First tokens of a window, the prompt.")] = 50,
    new_tokens: Annotated[int, typer.Option(min=1, help="Next tokens of a window, to be repeated.")] = 50,
    seed: Annotated[int, typer.Option(help="Chooses the windows.")] = 0,
    train: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Token files or text in place of the run's sources; may be repeated."),
    ] = None,
    heldout: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Token files or text in place of the run's held-out ones; may be repeated."),
    ] = None,
    count: Annotated[
        bool | None,
        typer.Option(
            "--count/--no-count",
            help="Group the windows by how often they occur in the training tokens, all of which are read for it; "
            "default: up to 1B tokens.",
        ),
    ] = None,
    output: Annotated[str | None, typer.Option(help="Folder for evals/memorised/TIME/; absent: the run.")] = None,
    as_json: Json = False,
) -> None:
    """Measure how often a model continues its training text token for token, and held-out text for comparison.

    Windows of consecutive tokens are drawn from the documents of a run. The model continues the first tokens of each
    greedily; a window is extractable if all its next tokens follow. MODEL is a run, its export, or with --train any
    Hugging Face folder. Results go to RUN/evals/memorised/TIME/ and into the model card.
    """
    from smalti.cli.eval.run import record_scores, require_newest, require_writable
    from smalti.cli.extras import need
    from smalti.evals.memorised import measure
    from smalti.serve.engine.engine import Engine

    need("data", "smalti eval memorised", "pyarrow")
    folder = _find(model)
    require_newest(folder)
    require_writable(output)
    output = output and _absolute(output)
    settings = measure.Settings(windows, prompt_tokens, new_tokens, seed, count)
    about = {"model_folder": folder.folder, "compute_dtype": "fp32", "step": folder.record.get("step")}
    with ExitStack() as stack, ProgressLine("tokens") as progress:
        stack.enter_context(chdir("."))  # ``_open`` enters the directory from which the paths of the run's config start
        data = _open(folder, train or [], heldout or [])
        for source in (*data.train.values(), *data.heldout.values()):
            stack.callback(source.close)
        results = measure.run(
            Engine.from_folder(folder.folder),
            data.train,
            data.heldout,
            settings,
            output or folder.run_folder,
            takedowns=data.takedowns,
            about=about | {"epochs": data.epochs},
            progress=progress,
        )
    record_scores(folder, results, in_run=output is None, upload=False)
    print_json(results) if as_json else _print(results)


@dataclass(frozen=True)
class _Data:
    """The sources of both kinds of windows."""

    train: "Mapping[str, Source]"
    heldout: "Mapping[str, Source]"
    takedowns: "Mapping[str, Int64s]" = field(default_factory=dict)
    epochs: Mapping[str, float] = field(default_factory=dict)
    """Source -> how often the run has read it by the step of the model; empty where that is not known."""


def _open(folder: "ModelFolder", train: Sequence[str], heldout: Sequence[str]) -> _Data:
    """Open the typed paths, and for what was not typed the data of the run."""
    from smalti.base.errors import UserError
    from smalti.cli.data.arguments import open_folder
    from smalti.cli.working_directory import enter, load_run
    from smalti.data.examples.source import ExampleSource
    from smalti.data.order.schedule import build_schedule, tokens_before
    from smalti.data.stream.open import open_sources, read_indexes, takedowns_of

    seen, unseen = (
        {path: open_folder(_absolute(path), [], folder.folder) for path in paths} for paths in (train, heldout)
    )
    if folder.run_folder is None and not train:
        raise UserError(
            f"{folder.folder} is not of a run, so its training documents are not known",
            allowed="a run, its export, or --train PATH",
            hint="--train PATH --heldout PATH, with token files or text",
        )
    if folder.run_folder is None or (train and heldout):
        return _Data(seen, unseen)
    recipe, _ = enter(folder.run_folder, [])
    config = load_run(recipe).config
    unseen = unseen or {name: open_folder(path, [], folder.folder) for name, path in config.data.heldout.items()}
    if train:
        return _Data(seen, unseen)
    indexes = read_indexes(config.data)
    sources = open_sources(config.data, indexes).sources
    if any(isinstance(source, ExampleSource) for source in sources.values()):
        raise UserError(
            f"{folder.run_folder} was trained on examples, not on documents",
            allowed="a run on documents",
            hint="--train PATH --heldout PATH, with token files or text",
        )
    takedowns, step = takedowns_of(indexes), folder.record.get("step")
    read = {} if step is None else tokens_before(build_schedule(config.data, config.length), step)
    epochs = {name: tokens / sources[name].n_tokens for name, tokens in read.items()}
    return _Data(sources, unseen, takedowns.spans if takedowns else {}, epochs)


def _find(model: str) -> "ModelFolder":
    """Find a model, with absolute paths; the run also where its ``export/`` was named."""
    from smalti.serve.folders import ModelFolder, find

    named = find(model)
    path = Path(os.path.abspath(named.folder))
    is_of_run = path.name == "export" and (path.parent / "config.yaml").is_file()
    run = str(path.parent) if is_of_run else named.run_folder
    return ModelFolder(str(path), run and os.path.abspath(run), named.version)


def _absolute(path: str) -> str:
    from smalti.base import store

    return os.path.abspath(path) if store.is_local(path) else path


def _print(results: dict[str, Any]) -> None:
    config, counted = results["config"], False
    rows = []
    for name, score in results["tasks"].items():
        groups = score.get("by_occurrences", {})
        counted |= bool(groups)
        rows.append(_cells(name, "all", score))
        rows += [_cells("", group, part) for group, part in groups.items()]
    length = f"{config['prompt_tokens']} + {config['new_tokens']} tokens"
    print(f"{results['model']}: windows of {length}, continued greedily\n")
    print(table(("windows of", "occurrences", "n", "extractable", "95 % interval", "matched tokens"), rows))
    print("\nextractable: all new tokens are those of the window; matched tokens: mean share of equal ones")
    if counted:
        print("occurrences: of the whole window in the training tokens")
    else:
        print(f"occurrences are not counted; --count reads all {format_count(results['train_tokens'])} training tokens")
    if "heldout" not in results["tasks"]:
        print("no held-out documents to compare with; --heldout PATH names some")
    if results["epochs"]:
        epochs = ", ".join(f"{name} {value:.2f}" for name, value in results["epochs"].items())
        print(f"epochs read by step {results['step']:,}: {epochs}")
    print(f"samples: {results['folder']}/samples.jsonl" if "folder" in results else "not saved; --output FOLDER does")


def _cells(name: str, group: str, score: dict[str, Any]) -> tuple[str, ...]:
    low, high = score["interval"]
    matched = f"{score['matched_frac']['value']:.3f}"
    return name, group, f"{score['n']:,}", f"{score['value']:.3f}", f"{low:.3f} to {high:.3f}", matched
