"""``smalti export``: a run's newest checkpoint as a Hugging Face folder."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Dtype(StrEnum):
    """Number format of the weights."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@app.command(epilog="Example: smalti export runs/demo --dtype bf16 --verify")
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    step: Annotated[
        int | None,
        typer.Option(help="Step of the checkpoint; absent: the best of train.checkpoint.best, else the newest."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder to write; absent: RUN/export.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.FP32,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a run that trained adapters: the whole model, with them merged.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Also compare logits with transformers.")] = False,
    upload: Annotated[
        bool, typer.Option(help="Upload RUN/export to the run's MLflow run, if it has one.", show_default=False)
    ] = True,
) -> None:
    """Write a checkpoint as a Hugging Face folder: safetensors, configs, tokenizer, model card.

    The weights are read back and compared before the folder appears. Of a run that trained adapters, these alone are
    written to RUN/adapter, in PEFT's format; with --merge the whole model.
    """
    from smalti.base import store
    from smalti.base.units import format_bytes
    from smalti.cli.extras import need
    from smalti.distributed.checkpoint import export as exporter
    from smalti.distributed.checkpoint.card import RECORD
    from smalti.model.huggingface import open_folder
    from smalti.track.run import resolve
    from smalti.track.trackers import publish

    if verify:
        need("verify", "smalti export --verify", "transformers")
    run = resolve(run)
    folder = exporter.export(run, step=step, output=output, dtype=dtype.value, merge=merge)
    record = store.read_json(store.join(folder, RECORD))
    n_bytes = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    what = f"step {record['step']}, {record['dtype']}, weights {format_bytes(n_bytes)}"
    if "base" in record:
        _print_adapter(folder, record, what, verify=verify)
        return
    print(f"{folder}: {what}; read back and compared: identical")
    for other, errors in exporter.errors_of_merge(run, record["step"], logits=verify).items() if merge else ():
        print(f"relative error if {other}: {', '.join(f'{name} {value:.1e}' for name, value in errors.items())}")
    if verify:
        print(f"transformers computes the same logits: relative error {exporter.verify(folder):.1e} (fp32)")
    for line in publish(run, folder, "export") if upload and output is None else ():
        typer.echo(line, err=True)
    if open_folder(folder).config.num_labels:
        print(f"next: transformers' AutoModelForSequenceClassification.from_pretrained('{folder}') computes its scores")
    else:
        print(f"next: smalti chat {folder if output else run}")


def _print_adapter(folder: str, record: dict[str, Any], what: str, *, verify: bool) -> None:
    from smalti.base import store
    from smalti.base.errors import UserError
    from smalti.model.adapters.peft import CONFIG

    if verify:
        raise UserError(
            f"--verify compares whole models; {folder} holds adapters",
            allowed="--verify with --merge",
            hint=f"smalti export {record['run_folder']} --merge --verify",
        )
    base = record["base"]["init_from"]
    print(f"{folder}: adapters of {base}, {what}")
    has_scores = store.read_json(Path(folder) / CONFIG)["task_type"] == "SEQ_CLS"
    use = (
        f"PEFT, as {folder}/README.md says" if has_scores else f"smalti serve {base} --adapter {record['run']}={folder}"
    )
    print(f"next: {use}, or smalti export RUN --merge")
