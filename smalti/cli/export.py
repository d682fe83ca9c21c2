"""``smalti export``: a run's newest checkpoint as a Hugging Face folder."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


_Url = Annotated[
    str | None,
    typer.Option("--from", metavar="URL", help="The run's copies in a store (s3://bucket/runs/NAME), read in parts."),
]
_Average = Annotated[
    str | None, typer.Option(metavar="last:N", help="The mean of the weights of this checkpoint and those before.")
]


class Dtype(StrEnum):
    """Number format of the weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command(epilog="Example: smalti export runs/demo --dtype bf16 --verify")
def export(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run folder, its name in runs/, or models:/NAME/NUMBER of a checkpoint."),
    ],
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint; absent: the best of train.checkpoint.best, else the newest."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; absent: RUN/export.")] = None,
    url: _Url = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.FP32,
    average: _Average = None,
    ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights (train.ema).")] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trained adapters: the whole model, with them merged.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also compare logits with transformers.")] = False,
    name: Annotated[
        str | None, typer.Option(help="Name in the model registry ('smalti models'); absent: the run's name.")
    ] = None,
    register: Annotated[
        bool, typer.Option(help="Register the folder in the model registry.", show_default=False)
    ] = True,
    upload: Annotated[
        bool, typer.Option(help="Upload RUN/export to the run's MLflow run, if it has one.", show_default=False)
    ] = True,
) -> None:
    """Write a checkpoint as a Hugging Face folder: safetensors, configs, tokenizer, model card.

    The weights are read back and compared before the folder appears. Of a run that trained adapters, these alone are
    written to RUN/adapter, in PEFT's format; with --merge the whole model. The folder is registered as a version of a
    model: see 'smalti models'.
    """
    from smalti.base import store
    from smalti.cli.extras import need
    from smalti.distributed.checkpoint import export as exporter
    from smalti.track.registry.facts import RECORD
    from smalti.track.trackers import publish

    if verify:
        need("verify", "smalti export --verify", "transformers")
    _check_name(name, register)
    run_folder, step, checkpoints = _source(run, step, url)
    form: Any = {"dtype": dtype.value, "merge": merge, "average": average, "ema": ema}
    folder = exporter.export(run_folder, step=step, output=output, checkpoints=checkpoints, **form)
    record = store.read_json(store.join(folder, RECORD))
    is_adapter = "base" in record
    if is_adapter:
        _print_adapter(folder, record, verify=verify)
    else:
        _print_model(folder, run_folder, record, checkpoints, merge=merge, verify=verify)
    uploads = upload and output is None and not is_adapter
    for line in publish(run_folder, folder, "export") if uploads else ():
        typer.echo(line, err=True)
    if register:
        _register(folder, name or record["run"], uploaded_to="export" if uploads else None)
    print(f"next: {_next(folder, record, run_folder, is_inside=not output)}")


def _print_model(
    folder: str, run: Path, record: dict[str, Any], checkpoints: str | Path | None, *, merge: bool, verify: bool
) -> None:
    from smalti.distributed.checkpoint import export as exporter

    print(f"{folder}: {_what(folder, record)}; read back and compared: identical")
    place: Any = {"logits": verify, "checkpoints": checkpoints}
    for other, errors in exporter.errors_of_merge(run, record["step"], **place).items() if merge else ():
        print(f"relative error if {other}: {', '.join(f'{part} {value:.1e}' for part, value in errors.items())}")
    if verify:
        print(f"transformers computes the same logits: relative error {exporter.verify(folder):.1e} (fp32)")


def _what(folder: str, record: dict[str, Any]) -> str:
    from smalti.base.units import format_bytes

    n_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    averaged = record.get("averaged_steps")
    if record.get("ema"):
        return f"moving average of the weights at step {record['step']}, {record['dtype']}, {format_bytes(n_bytes)}"
    steps = f"mean of steps {', '.join(map(str, averaged))}" if averaged else f"step {record['step']}"
    return f"{steps}, {record['dtype']}, weights {format_bytes(n_bytes)}"


def _next(folder: str, record: dict[str, Any], run: Path, *, is_inside: bool) -> str:
    """Return what to type next; ``is_inside``: the folder is in the run folder."""
    from smalti.base import store
    from smalti.model.adapters.peft import CONFIG
    from smalti.model.huggingface import open_folder

    if "base" in record:
        has_scores = store.read_json(Path(folder) / CONFIG)["task_type"] == "SEQ_CLS"
        serve = f"smalti serve {record['base']['init_from']} --adapter {record['run']}={folder}"
        return f"{f'PEFT, as {folder}/README.md says' if has_scores else serve}, or smalti export {run} --merge"
    if open_folder(folder).config.num_labels:
        return f"transformers' AutoModelForSequenceClassification.from_pretrained('{folder}') computes its scores"
    return f"smalti chat {run if is_inside else folder}"


def _source(run: str, step: int | None, url: str | None) -> tuple[Path, int | None, Path | str | None]:
    """Return the run folder, step and place of checkpoints that RUN and --from mean; None: those of the run."""
    from smalti.base import store
    from smalti.base.errors import UserError
    from smalti.track.registry.reference import is_reference
    from smalti.track.registry.versions import resolve as resolve_reference
    from smalti.track.run import resolve

    if url is not None and (is_reference(run) or store.is_local(url)):
        raise UserError(
            f"--from {url} with {run}",
            allowed="--from URL of an object store, with a run",
            hint="smalti export RUN --from s3://bucket/runs/NAME",
        )
    if not is_reference(run):
        return resolve(run), step, url
    version = resolve_reference(run)
    if version.kind != "checkpoint" or version.run_folder is None:
        raise UserError(
            f"models:/{version.label} is no checkpoint of a run: {version.path}",
            allowed="a run, or the version of a checkpoint",
            hint=f"smalti chat models:/{version.label}" if version.kind == "model" else None,
        )
    if step is not None:
        raise UserError(f"--step {step} has no effect: {run} is the checkpoint of step {version.step}")
    return Path(version.run_folder), version.step, Path(version.path).parent


def _check_name(name: str | None, register: bool) -> None:
    from smalti.base.errors import UserError
    from smalti.track.registry.reference import check_name

    if name is not None and not register:
        raise UserError(f"--name {name} has no effect with --no-register", allowed="one of them")
    if name is not None:
        check_name(name)


def _register(folder: str, name: str, *, uploaded_to: str | None = None) -> None:
    """Register the folder, in MLflow's registry too if it is uploaded there; an error is a warning."""
    from smalti.base.errors import SmaltiError
    from smalti.track.registry.changes import add
    from smalti.track.registry.facts import read_facts
    from smalti.track.trackers import register

    try:
        version, _ = add(read_facts(folder), name)
    except (SmaltiError, OSError) as error:
        typer.echo(f"warning: {folder} is not registered: {error}", err=True)
        return
    print(f"registered as models:/{version.label}")
    for line in register(version, uploaded_to) if uploaded_to else ():
        typer.echo(line, err=True)


def _print_adapter(folder: str, record: dict[str, Any], *, verify: bool) -> None:
    from smalti.base.errors import UserError

    if verify:
        raise UserError(
            f"--verify compares whole models; {folder} holds adapters",
            allowed="--verify with --merge",
            hint=f"smalti export {record['run_folder']} --merge --verify",
        )
    print(f"{folder}: adapters of {record['base']['init_from']}, {_what(folder, record)}")
