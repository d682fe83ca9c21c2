"""``smalti data compare``: the value of better data, by the same small model trained on versions of a set."""

import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smalti.cli.data.arguments import Json
from smalti.cli.extras import need_data_extra
from smalti.cli.progress import ProgressLine

if TYPE_CHECKING:
    from smalti.data.prepare.versions.prepare import Version
    from smalti.evals.data_value.runs import Settings

_BYTES_OF_TOKEN = 8
"""Bytes of training text that are sampled for each token: more than a token has in any language, so that nothing is
repeated for lack of a larger sample."""
_VOCAB_SIZE = 4096
RESULT, PAGE, DATA = "compare.json", "compare.html", "data.json"


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="The output of a build.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The output of another build.")],
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="C ... A.B=VALUE ...", help="More builds, and changes to the recipe of --model."),
    ] = None,
    tokens: Annotated[str, typer.Option(help="Training tokens of each run: 1000000, 1e6 or 1M.")] = "1M",
    seeds: Annotated[int, typer.Option(min=2, help="Runs of each version, with other initial weights and order.")] = 3,
    model: Annotated[str, typer.Option(metavar="RECIPE", help="Recipe of the model and its training.")] = "demo",
    heldout: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Further held-out text, which then decides: a set, or text, JSONL, Parquet."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Tokenizer for all; absent: one of 4,096 entries is trained on them."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Absent: runs/compare-A-B, of the names of the first two.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be trained, and exit.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Train without asking.")] = False,
    as_json: Json = False,
) -> None:
    """Train the same small model on versions of a set, and compare their loss on the same held-out text.

    Prints held-out bits per byte with intervals over the seeds, and how many tokens of the worse version one of the
    better is worth. Of more than two versions each is compared with A, and with the one before it. Held-out text: what
    the versions hold out, each by itself and their mean, or --heldout. Documents that a version is trained on are left
    out.

    Results: compare.json and compare.html in the output folder, whose runs are runs of 'smalti train'. The same command
    again continues; with more --seeds it adds runs.
    """
    from smalti.base import store
    from smalti.cli.tables import print_json
    from smalti.data.prepare.versions.prepare import Version
    from smalti.evals.data_value.runs import Settings

    need_data_extra()
    overrides = tuple(item for item in more or () if "=" in item)
    settings = Settings(model, overrides, _count(tokens), seeds)
    folders = (first, second, *(item for item in more or () if "=" not in item))
    versions = {name: Version.of(place) for name, place in _named(folders).items()}
    folder = Path(output or f"runs/compare-{Path(first).resolve().name}-{Path(second).resolve().name}")
    _check(versions, heldout, settings)
    if dry_run:
        values = _planned(settings, versions, folder)
        print_json(values) if as_json else print(_plan_text(values))
        return
    identity = _identity(settings, versions, heldout, tokenizer)
    if not _is_begun(folder, identity):
        _ask(folder, len(versions) * seeds, settings, yes=yes)
        _write_data(folder, versions, identity, settings)
    data = store.read_json(folder / DATA)
    _train(folder, list(versions), settings, quiet=as_json)
    result = _result(folder, settings, data)
    print_json(result) if as_json else print(_text(result, folder))


def _named(folders: Sequence[str]) -> dict[str, str]:
    """Return the folders by letter."""
    from smalti.base.errors import UserError

    if len(folders) > len(ascii_uppercase):
        raise UserError(f"{len(folders)} versions", allowed=f"2 to {len(ascii_uppercase)}", hint="compare fewer")
    return dict(zip(ascii_uppercase, folders, strict=False))


def _count(text: str) -> int:
    """Return ``--tokens`` as a number."""
    from smalti.base.errors import UserError

    factor = {"k": 1e3, "M": 1e6, "B": 1e9}.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 1 <= value < 1e15:
        raise UserError(f"--tokens {text} is no number of tokens", allowed="1000000, 1e6, 500k, 2M", hint="--tokens 1M")
    return round(value)


def _check(versions: "dict[str, Version]", heldout: str | None, settings: "Settings") -> None:
    """Raise for sets that cannot be compared, and for a wrong recipe, before anything is written."""
    from smalti.base.errors import DataError, UserError

    for a, b in combinations(versions.values(), 2):
        if a.digest == b.digest:
            raise UserError(
                f"{a.folder} and {b.folder} hold the same documents",
                allowed="versions that differ",
                hint="smalti data diff A B",
            )
    settings.base()
    for version in versions.values():
        if not version.n_bytes("train"):
            raise DataError(f"{version.folder} holds no training documents", hint=f"see {version.folder}/report.md")
    if heldout is None and not any(version.documents("heldout") for version in versions.values()):
        raise DataError(
            f"none of {', '.join(version.folder for version in versions.values())} holds documents out",
            allowed="held-out text that no version is trained on",
            hint="heldout_frac=0.05 in the recipes, or --heldout PATH",
        )


def _identity(
    settings: "Settings", versions: "dict[str, Version]", heldout: str | None, tokenizer: str | None
) -> dict[str, Any]:
    """Return what a folder of results belongs to."""
    from smalti.config.identity import identity

    config = identity(settings.base())
    for name in ("name", "seed"):
        config.pop(name)
    return {
        **{name: [version.folder, version.digest] for name, version in versions.items()},
        "tokens": settings.tokens,
        "model": settings.model,
        "heldout": heldout,
        "tokenizer": tokenizer,
        "recipe": config,
    }


def _is_begun(folder: Path, values: dict[str, Any]) -> bool:
    """Return whether the token files of this comparison are there. UserError where they are of another one."""
    import json

    from smalti.base import store
    from smalti.base.errors import UserError
    from smalti.config.identity import differing_rows
    from smalti.config.show import flatten

    path = folder / DATA
    if not path.is_file():
        return False
    rows = differing_rows([flatten(store.read_json(path)["settings"]), flatten(json.loads(json.dumps(values)))])
    if rows:
        shown = "".join(f"\n  {key}: {before} -> {after}" for key, (before, after) in rows.items())
        raise UserError(
            f"{folder} holds another comparison; what differs (there -> here):{shown}",
            allowed="the same settings, but for --seeds",
            hint="--output FOLDER for this one",
        )
    return True


def _ask(folder: Path, runs: int, settings: "Settings", *, yes: bool) -> None:
    from smalti.base.errors import UserError
    from smalti.base.units import format_count

    what = f"{runs} runs of {format_count(settings.tokens)} tokens in {folder}"
    if not yes and not sys.stdin.isatty():
        raise UserError(f"this trains {what}", hint="--yes trains, --dry-run only prints")
    if not yes and not typer.confirm(f"train {what}?"):
        raise typer.Exit(0)


def _write_data(folder: Path, versions: "dict[str, Version]", identity: dict[str, Any], settings: "Settings") -> None:
    """Write the token files and, last, what they are."""
    import shutil

    from smalti.base import store
    from smalti.config.curate import TokenizeConfig
    from smalti.data.prepare.tokenize import tokenize
    from smalti.data.prepare.versions.prepare import prepare

    documents, tokenizer = folder / "prepared", identity["tokenizer"]
    shutil.rmtree(documents, ignore_errors=True)  # left by a kill
    with ProgressLine(rate=True) as progress:
        values = prepare(documents, versions, identity["heldout"], _BYTES_OF_TOKEN * settings.tokens, progress)
        plain: dict[str, Any] = {"documents": str(documents), "output": str(folder / "tokens")}
        plain |= {"vocab_size": _VOCAB_SIZE} if tokenizer is None else {"tokenizer": tokenizer}
        tokenize(TokenizeConfig.model_validate(plain), progress)
    store.write_json(folder / DATA, values | {"settings": identity})
    shutil.rmtree(documents)


def _train(folder: Path, versions: list[str], settings: "Settings", *, quiet: bool) -> None:
    """Train what is not finished, by ``smalti train``; exit with its code if that is not 0."""
    from smalti.base import store
    from smalti.base.clock import now_s
    from smalti.base.errors import ExitCode
    from smalti.base.units import format_seconds
    from smalti.cli.children import run_child
    from smalti.config.show import dump
    from smalti.evals.data_value.runs import is_done, run_folder

    runs = [(version, seed) for seed in range(settings.seeds) for version in versions]
    left = [run for run in runs if not is_done(run_folder(folder, *run))]
    start_s = now_s()
    for number, (version, seed) in enumerate(left):
        place = run_folder(folder, version, seed)
        recipe = place.with_suffix(".yaml")
        store.write_text(recipe, dump(settings.config(folder, version, seed)))
        time_left = f", {format_seconds((now_s() - start_s) / number * (len(left) - number))} left" if number else ""
        order = len(runs) - len(left) + number + 1
        print(f"\n== {version}, seed {seed}: run {order} of {len(runs)}{time_left}", file=sys.stderr, flush=True)
        code = run_child([sys.executable, "-m", "smalti", "train", str(recipe)], stdout=2 if quiet else None)
        if code != ExitCode.DONE:
            print(f"the comparison has stopped: {place} ended with code {code}; run again, it continues",
                  file=sys.stderr)  # fmt: skip
            raise typer.Exit(code)


def _result(folder: Path, settings: "Settings", data: dict[str, Any]) -> dict[str, Any]:
    """Return the result, which is written to ``compare.json`` and ``compare.html``."""
    from smalti.base import clock, store
    from smalti.cost.params import count
    from smalti.evals.data_value.page import page
    from smalti.evals.data_value.result import compared
    from smalti.evals.data_value.runs import curves, train_tokens

    config = settings.config(folder, "A", 0)
    measured = curves(folder, list(data["versions"]), settings.seeds, list(config.data.heldout))
    tokens = config.length.total_tokens
    versions = {name: entry | {"tokens": train_tokens(folder / "tokens", name)}
                for name, entry in data["versions"].items()}  # fmt: skip
    result = {
        "time": clock.utc_text(),
        "model": settings.model,
        "params": count(config.model).total,
        "tokens": tokens,
        "seeds": settings.seeds,
        "versions": {name: entry | {"epochs": tokens / entry["tokens"]} for name, entry in versions.items()},
        "heldout": {name: data["heldout"][name] for name in config.data.heldout},
        **compared(measured),
        "curves": measured,
    }
    store.write_json(folder / RESULT, result)
    store.write_text(folder / PAGE, page(result))
    return result


def _planned(settings: "Settings", versions: "dict[str, Version]", folder: Path) -> dict[str, Any]:
    """Return what would be trained."""
    from smalti.cost.flops import train_flops_per_token
    from smalti.cost.params import count
    from smalti.evals.data_value.runs import is_done, run_folder

    config = settings.base()
    runs = [(version, seed) for seed in range(settings.seeds) for version in versions]
    return {
        "output": str(folder),
        "versions": {
            name: {
                "folder": version.folder,
                **{f"{split}_documents": version.documents(split) for split in ("train", "heldout")},
                **{f"{split}_bytes": version.n_bytes(split) for split in ("train", "heldout")},
            }
            for name, version in versions.items()
        },
        "params": count(config.model).total,
        "runs": len(runs),
        "runs_done": sum(is_done(run_folder(folder, *run)) for run in runs),
        "tokens": settings.tokens,
        "flops": len(runs) * settings.tokens * train_flops_per_token(config.model, config.data.seq_len),
    }


def _plan_text(values: dict[str, Any]) -> str:
    from smalti.base.units import format_bytes, format_count, format_flops
    from smalti.cli.tables import table

    head = ("", "folder", "documents", "text", "held out", "text")
    rows = [
        (
            name,
            entry["folder"],
            *(text for split in ("train", "heldout")
              for text in (f"{entry[f'{split}_documents']:,}", format_bytes(entry[f"{split}_bytes"]))),
        )
        for name, entry in values["versions"].items()
    ]  # fmt: skip
    runs = (
        f"{values['runs']} runs of {format_count(values['tokens'])} tokens, {values['runs_done']} finished: a model of "
        f"about {format_count(values['params'])} parameters, {format_flops(values['flops'])} in all"
    )
    return f"{table(head, rows)}\n\n{runs}\nnothing was written; the results go to {values['output']}"


def _text(result: dict[str, Any], folder: Path) -> str:
    from smalti.cli.tables import table
    from smalti.evals.data_value import words

    blocks = [
        table(words.SETS, words.set_rows(result)),
        "Held-out bits per byte (less is better)\n\n" + table(words.score_head(result), words.score_rows(result)),
        "Differences\n\n" + table(words.DIFFERENCES, words.difference_rows(result)),
    ]
    if (verdict := words.verdict(result)) is not None:
        blocks.append(verdict)
    if (worth := words.worth_of_two(result)) is not None:
        blocks.append("Tokens for the same loss\n\n" + table(words.worth_head(worth), words.worth_rows(worth)))
    return "\n\n".join([*blocks, "\n".join(words.notes(result)), f"plots: {folder / PAGE}"])
