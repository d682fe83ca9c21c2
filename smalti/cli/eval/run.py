"""``smalti eval run``: evaluates a model with a suite."""

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.options import Json, Model
from smalti.cli.progress import ProgressLine
from smalti.cli.tables import print_json, table

if TYPE_CHECKING:
    from smalti.config.eval import EvalConfig
    from smalti.evals.cache import Cache
    from smalti.serve.folders import ModelFolder

_NAMED_BENCHMARKS = 5
_TRUNCATED_FRAC = 0.5
"""From this share of truncated answers on there is a hint."""


def run(
    model: Model,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="A.B=VALUE", help="Changes to the suite.")] = None,
    suite: Annotated[str, typer.Option(help="Name of the suite; 'smalti eval ls' lists them.")] = "demo",
    output: Annotated[str | None, typer.Option(help="Folder for evals/SUITE/TIME/; absent: the run.")] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|fp32|bf16",
            help="Number format to compute in; auto: fp32, and bf16 for held-out text where the hardware has it and a "
            "sample of the text gives the same result.",
        ),
    ] = "auto",
    cached: Annotated[
        bool, typer.Option(help="Take results of the same model, task and settings from an earlier evaluation.")
    ] = True,
    as_json: Json = False,
    upload: Annotated[
        bool, typer.Option(help="Upload scores and results to the run's MLflow run, if it has one.", show_default=False)
    ] = True,
) -> None:
    """Run a suite on a run's export or on a Hugging Face folder, and print a table.

    For a run, results go to RUN/evals/SUITE/TIME/ and into the model card of its export; held-out folders of
    text and seq_len come from its config.
    """
    from smalti.data.tokenizer.chat import load_chat
    from smalti.evals import bf16
    from smalti.evals import suite as suites_module
    from smalti.fleet import machine
    from smalti.serve.engine.engine import Engine
    from smalti.serve.folders import find
    from smalti.track.registry.facts import weights_of

    folder, overrides = find(model), overrides or []
    config = _config(suite, folder, overrides)
    require_newest(folder)
    suites_module.check_folders(config)
    _require_effect(config, overrides)
    try_bf16, dtype = dtype == "auto", _dtype(dtype)
    require_writable(output)
    engine = Engine.from_folder(folder.folder, dtype=dtype)
    about = {"model_folder": folder.folder, "compute_dtype": dtype, "step": folder.record.get("step")}
    about["weights"] = weights_of(folder.record)
    cache = _cache(folder, output, dtype) if cached else None
    with _named_interrupt(cache is not None, cached), ProgressLine("tokens") as progress:
        results = suites_module.run(
            engine,
            config,
            output or folder.run_folder,
            about=about,
            progress=progress,
            try_bf16=try_bf16 and bf16.is_native(engine.model, machine.cpu()["features"]),
            chat=load_chat(folder.folder),
            cache=cache,
        )
    record_scores(folder, results, in_run=output is None, upload=upload)
    print_json(results) if as_json else _print(results)


@contextmanager
def _named_interrupt(has_cache: bool, is_wanted: bool) -> Iterator[None]:
    """Turn Ctrl-C into an error that names what is kept."""
    from smalti.base.errors import Interrupted

    try:
        yield
    except KeyboardInterrupt as error:
        if not has_cache:
            hint = (
                "--output FOLDER keeps finished tasks" if is_wanted else "without --no-cached finished tasks are kept"
            )
            raise Interrupted("interrupted; nothing is kept", hint=hint) from error
        raise Interrupted("interrupted; finished tasks are kept", hint="the same command resumes after them") from error


def require_writable(output: str | None) -> None:
    """Raise UserError where the folder of --output cannot be made, before anything is computed."""
    from smalti.base import store
    from smalti.base.errors import UserError

    if output is None or not store.is_local(output):
        return
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--output {output} cannot be made: {error.strerror}",
            allowed="a folder that this user can write to",
            hint="--output FOLDER",
        ) from error


def _dtype(name: str) -> str:
    """Return the dtype to load the model in; auto: fp32."""
    from smalti.base.errors import UserError
    from smalti.model.dtypes import DTYPES

    if name not in ("auto", *DTYPES):
        raise UserError(f"--dtype {name} is not known", allowed=", ".join(("auto", *DTYPES)))
    return "fp32" if name == "auto" else name


def suite_values(suite: str) -> dict[str, Any]:
    """Return the fields of the suite of this name. Raises UserError if there is none."""
    from smalti.base.errors import UserError, nearest
    from smalti.config.eval import suites

    if suite not in suites():
        close = nearest(suite, suites())
        raise UserError(
            f"there is no suite '{suite}'",
            allowed=", ".join(suites()),
            hint=f"did you mean --suite {close}?"
            if close
            else "smalti eval ls; suite=NAME names the results of tasks=[...]",
        )
    return suites()[suite].model_dump(mode="json")


def _cache(folder: "ModelFolder", output: str | None, dtype: str) -> "Cache | None":
    """Return the cache below the run, or the folder of --output; None for a model without either, or in a store."""
    from smalti.base import store
    from smalti.evals.cache import Cache

    place = output or folder.run_folder
    if place is None or not store.is_local(folder.folder):
        return None
    return Cache(store.join(place, "evals/.cache"), folder.folder, dtype)


def _config(suite: str, folder: "ModelFolder", overrides: list[str]) -> "EvalConfig":
    """Return the named suite, overridden by the data of the run's config, then by the command line.

    Held-out examples of a tuned run are no text and are left out: their loss is measured during training.
    """
    from smalti.base import store
    from smalti.cli.working_directory import placed
    from smalti.config.eval import EvalConfig
    from smalti.config.load import from_dict, load
    from smalti.config.run import RunConfig
    from smalti.data.examples.folder import RECORD_NAME

    value = suite_values(suite)
    if folder.run_folder is not None:
        data = load(RunConfig, folder.run_folder).config.data
        heldout = placed(folder.run_folder, data.heldout)
        text = {name: path for name, path in heldout.items() if not store.exists(store.join(path, RECORD_NAME))}
        value |= {"heldout": text, "seq_len": data.seq_len}
    return from_dict(EvalConfig, value, f"suite {suite}", overrides).config


def _require_effect(config: "EvalConfig", overrides: list[str]) -> None:
    """Raise UserError for an override that the tasks do not read."""
    from smalti.base.errors import UserError
    from smalti.evals.tasks.settings import without_effect

    names = [re.split(r"[.\[=]", override, maxsplit=1)[0] for override in overrides]
    unread, tasks = without_effect(names, config)
    if unread:
        raise UserError(
            f"{unread[0]} has no effect on {', '.join(tasks)} (suite {config.suite})",
            allowed="changes to fields that one of the tasks reads",
            hint="task_shots is for tasks of files"
            if unread[0] == "shots"
            else "remove it, or name other 'tasks=[...]'",
        )


def _upload(run: str, results: dict[str, Any]) -> None:
    """Upload scores as metrics at the model's step, and the folder of results, to the run's tracker."""
    from smalti.track.trackers import publish

    suite = results["suite"]
    folder = Path(results["folder"])
    scores = {
        f"evals/{suite}/{task.replace('/', '.')}/{score['metric']}": float(score["value"])
        for task, score in results["tasks"].items()
    }
    at = f"evals/{suite}/{folder.name}"
    for line in publish(run, folder, at, numbers=scores, step=results.get("step")):
        typer.echo(line, err=True)


def record_scores(folder: "ModelFolder", results: dict[str, Any], *, in_run: bool, upload: bool) -> None:
    """Put the scores into the card and the tracker of the run, if they are in its folder, and the model registry.

    An error of tracker or registry is a warning.
    """
    from smalti.base.errors import SmaltiError
    from smalti.distributed.checkpoint.export import refresh_card
    from smalti.track.registry.changes import add_scores
    from smalti.track.registry.scores import scores_of

    if folder.run_folder is not None and in_run:
        refresh_card(folder.run_folder)
        if upload:
            _upload(folder.run_folder, results)
    try:
        add_scores(folder.folder, scores_of(results))
    except SmaltiError as error:
        typer.echo(f"warning: the scores are not in the model registry: {error}", err=True)


def require_newest(folder: "ModelFolder") -> None:
    """Raise UserError where the export of a run is not of its newest checkpoint."""
    from smalti.base.errors import UserError
    from smalti.distributed.checkpoint import checkpoint
    from smalti.track.checkpoints.names import step_of

    is_of_run = folder.run_folder is not None and folder.version is None  # a version was chosen as it is
    newest = checkpoint.newest(f"{folder.run_folder}/checkpoints") if is_of_run else None
    step = folder.record.get("step")
    if newest is not None and step_of(newest) != step:
        raise UserError(
            f"{folder.folder} is of step {step}; the newest checkpoint is of step {step_of(newest)}",
            hint=f"smalti export {folder.run_folder}   (to evaluate the old one, name {folder.folder})",
        )


def _print(results: dict[str, Any]) -> None:
    rows = [
        (
            name,
            score["metric"].replace("_", " "),
            f"{score['value']:.3f}",
            _interval(score),
            f"{score['n']:,}",
            _baseline(score),
        )
        for name, score in results["tasks"].items()
    ]
    rows += [
        (
            name,
            score["metric"].replace("_", " "),
            f"{score['value']:.3f}",
            _interval(score),
            f"{score['n']:,}",
            f"mean of {score['n_tasks']} tasks",
        )
        for name, score in results.get("groups", {}).items()
    ]
    print(f"{results['model']}: suite {results['suite']}\n")
    print(table(("task", "measure", "value", "95 % interval", "n", "baseline"), rows))
    _print_depths(results["tasks"])
    _print_truncated(results["tasks"])
    for name, reason in results.get("not_run", {}).items():
        print(f"not run: {name}: {reason}")
    if "gauntlet" in results:
        _print_gauntlet(results["gauntlet"])
    n_cached = sum(bool(score.get("cached")) for score in results["tasks"].values())
    if n_cached:
        of_all = f"{n_cached} of {len(results['tasks'])} results are"
        print(f"\n{of_all} of an earlier evaluation; --no-cached computes them again")
    if "folder" in results:
        print(f"\nread the samples: smalti eval read {shlex.quote(results['folder'])}")
    else:
        print("\nnot saved; --output FOLDER keeps scores and samples")


def _print_truncated(tasks: dict[str, dict[str, Any]]) -> None:
    """Print what to change where most answers end at the token limit: their accuracy says little."""
    from smalti.base.units import format_frac
    from smalti.evals.gauntlet.table import BY_NAME

    for name, score in tasks.items():
        if score.get("truncated_frac", 0) < _TRUNCATED_FRAC:
            continue
        limit = score.get("max_new_tokens")
        print(f"{name}: {format_frac(score['truncated_frac'])} of the answers end at the token limit", end="")
        print(f", {limit}" if limit else "")
        if limit and name not in BY_NAME:
            print(
                f"hint: in the task's file, max_new_tokens: {2 * limit}, or stop: [TEXT], the text that ends an answer"
            )


def _print_depths(tasks: dict[str, dict[str, Any]]) -> None:
    """Print the accuracy by depth of tasks with a length in their name."""
    sized = {
        name: score["categories"] for name, score in tasks.items() if "n_tokens" in score and "categories" in score
    }
    if sized:
        depths = sorted({depth for parts in sized.values() for depth in parts})
        rows = [
            (name, *(f"{parts[depth]['accuracy']:.3f}" if depth in parts else "-" for depth in depths))
            for name, parts in sized.items()
        ]
        print(f"\nAccuracy by depth, 0 is the beginning of the text\n\n{table(('task', *depths), rows)}")


def _print_gauntlet(gauntlet: dict[str, Any]) -> None:
    """Print the averages of (accuracy - chance) / (1 - chance), and what is missing in them."""
    from smalti.evals.gauntlet.table import CORE

    means = {name: (mean, f"of {mean['n'] + mean['n_missing']} tasks") for name, mean in gauntlet["categories"].items()}
    means["core average"] = (gauntlet["core_average"], f"of {len(CORE)} categories")
    rows = [
        (
            name.replace("_", " "),
            f"{mean['value']:.3f}",
            _interval(mean),
            f"{mean['n']} {total}",
            _partial(mean.get("without", [])),
        )
        for name, (mean, total) in means.items()
        if mean is not None
    ]
    print(f"\nGauntlet {gauntlet['mode']}, above chance\n")
    print(table(("average", "value", "95 % interval", "mean of", ""), rows))
    for category, without in gauntlet["dropped"].items():
        print(f"no average of {category.replace('_', ' ')}: without {', '.join(without)}")
    for reason in dict.fromkeys(gauntlet["missing"].values()):
        names = [name for name, why in gauntlet["missing"].items() if why == reason]
        print(f"missing: {', '.join(names)}: {reason}")


def _partial(without: list[str]) -> str:
    """Return what an average lacks, shortened: the lines below the table name every missing benchmark."""
    named = ", ".join(without[:_NAMED_BENCHMARKS])
    more = len(without) - _NAMED_BENCHMARKS
    return f"partial: without {named}{f' and {more} more' if more > 0 else ''}" if without else ""


def _interval(score: dict[str, Any]) -> str:
    return "{:.3f} to {:.3f}".format(*score["interval"]) if score["interval"] else "(n too small)"


def _baseline(score: dict[str, Any]) -> str:
    from smalti.track.report.words import chance_words, share_words

    if score["metric"] == "bits_per_byte":
        return (
            f"gzip -9 {score['gzip_bits_per_byte']:.3f}, xz -9 {score['xz_bits_per_byte']:.3f} "
            f"({score['n_bytes']:,} bytes)"
        )
    chance = f"{', '.join(chance_words(score))}: {score['verdict']}" if score.get("chance") else ""
    return ", ".join(filter(None, (chance, *share_words(score))))
