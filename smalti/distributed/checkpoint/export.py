"""Exports a run's checkpoint to a self-contained Hugging Face folder: weights, configs, tokenizer, model card.

Only the run folder is read: the checkpoint, ``config.yaml``, ``tokenizer/`` and, for the card, metrics, evals and
provenance, if any.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from smalti import __version__
from smalti.base import clock, store
from smalti.base.disk import writing
from smalti.base.errors import DataError, SmaltiError, UserError, missing_extra
from smalti.config.load import load
from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.data.tokenizer.encode import load_tokenizer
from smalti.distributed.checkpoint import card
from smalti.distributed.checkpoint.export_adapter import merge_errors, merged_weights, probe_ids, write_adapter
from smalti.distributed.checkpoint.source import Source, open_source
from smalti.model.dtypes import DTYPES
from smalti.model.huggingface import FAMILIES, load_folder, open_folder, save_folder
from smalti.track.registry.facts import RECORD
from smalti.track.run import RunFolder

_DTYPES = DTYPES | {"fp16": torch.float16}
_LARGEST_ERROR = 1e-5


def export(
    run_folder: str | Path,
    *,
    step: int | None = None,
    output: str | Path | None = None,
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
    merge: bool = False,
    checkpoints: str | Path | None = None,
    average: str | None = None,
    ema: bool = False,
) -> str:
    """Write a checkpoint of a run to ``output``, default ``RUN/export``: that of ``step``, else the best of
    ``train.checkpoint.best``, else the newest complete one.

    ``checkpoints``: the folder that has it, default ``RUN/checkpoints``, or the URL of the run's copies, whose parts
    are read one after another and not written to a disk. ``average``: ``last:5`` for the mean of the weights of that
    checkpoint and the four before it. ``ema``: the moving average of its weights (``train.ema``).

    Return the folder. It appears complete or not at all, and replaces an older one; before that, config and weights are
    read back and must be equal to the bit. The model is never whole in memory. Of a run that trained adapters these
    are written, in PEFT's format, to ``RUN/adapter``; with ``merge`` the whole model. Raises UserError where the run
    has no such checkpoint or no tokenizer, DataError where the tokenizer does not fit the model or ``output`` is no
    export.
    """
    run = RunFolder.read(run_folder).path
    if dtype not in _DTYPES:
        raise UserError(f"dtype={dtype} is not known", allowed=", ".join(_DTYPES))
    config = load(RunConfig, str(run)).config
    if config.adapter is not None and average is not None:
        raise UserError(f"--average has no effect on adapters, and the run {run} trained them", hint="leave it out")
    if ema and (config.train.ema is None or average is not None):
        _why_no_ema(run, average)
    if config.adapter is None and merge:
        raise UserError(f"--merge has no effect: the run {run} trained all weights", hint=f"smalti export {run}")
    if config.adapter is not None and not merge:
        adapter_folder = Path(output) if output is not None else run / "adapter"
        source = open_source(run, config, checkpoints, step=step, ema=ema)
        write_adapter(adapter_folder, run, config, source, dtype, _DTYPES[dtype])
        return str(adapter_folder)
    final = Path(output) if output is not None else run / "export"
    if final.exists() and not (final / "config.json").is_file():
        raise DataError(f"{final} exists and is not an exported model", hint="name another folder: --output FOLDER")
    tokenizer = load_tokenizer(_tokenizer(run))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"the tokenizer in {run / 'tokenizer'} has {tokenizer.vocab_size} tokens, the model "
            f"{config.model.vocab_size}"
        )
    source = open_source(run, config, checkpoints, step=step, average=average, ema=ema)
    weights = source.weights if config.adapter is None else merged_weights(run, config, source)
    with writing(final):
        _write(final, run, config, source, weights, tokenizer.eod_id, dtype)
    return str(final)


def _write(
    final: Path,
    run: Path,
    config: RunConfig,
    source: Source,
    weights: Mapping[str, Tensor],
    eod_id: int,
    dtype: str,
) -> None:
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    try:
        shutil.copytree(run / "tokenizer", temporary)
        save_folder(
            temporary,
            config.model,
            weights,
            eod_id=eod_id,
            generation=_generation(run),
            dtype=_DTYPES[dtype],
        )
        _check_same(temporary, config.model, weights, _DTYPES[dtype])
        record = {
            "run": config.name,
            "run_folder": str(run.resolve()),
            "step": source.step,
            **({"averaged_steps": sorted(source.averaged)} if source.averaged else {}),
            **({"ema": True} if source.ema else {}),
            "dtype": dtype,
            "time": clock.utc_text(),
            "smalti_version": __version__,
        }
        store.write_json(temporary / RECORD, record)
        store.write_text(temporary / "README.md", card.model_card(run, config, source.step, _weights_text(record)))
        _put_in_place(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def errors_of_merge(
    run_folder: str | Path, step: int, *, logits: bool, checkpoints: str | Path | None = None
) -> dict[str, dict[str, float]]:
    """Return ``merge_errors`` of a run whose base was quantised; empty for any other. checkpoints: as of ``export``."""
    run = RunFolder.read(run_folder).path
    config = load(RunConfig, str(run)).config
    if config.adapter is None or config.adapter.quantize is None:
        return {}
    return merge_errors(run, config, open_source(run, config, checkpoints, step=step), logits=logits)


def refresh_card(run_folder: str | Path) -> None:
    """Write the card in ``RUN/export`` again, with evals that were run after the export."""
    run = Path(run_folder)
    record = store.read_json(run / "export" / RECORD)
    config = load(RunConfig, str(run)).config
    store.write_text(run / "export" / "README.md", card.model_card(run, config, record["step"], _weights_text(record)))


def _weights_text(record: dict[str, Any]) -> str:
    averaged = record.get("averaged_steps")
    if record.get("ema"):
        return f"{record['dtype']}, the moving average (EMA) of the weights of all steps"
    return f"{record['dtype']}, the mean of steps {', '.join(map(str, averaged))}" if averaged else str(record["dtype"])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return ||a - b|| / ||b|| over all logits, in float64."""
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def verify(folder: str | Path) -> float:
    """Return the relative error of our logits, or scores, against those of ``transformers`` on the same folder, fp32.

    Raises UserError where transformers is not installed, SmaltiError where the error is 1e-5 or more.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
        from transformers.utils import logging
    except ImportError as error:
        raise missing_extra("transformers", "verify", "--verify", error) from error
    ours = load_folder(folder, torch.float32)
    logging.disable_progress_bar()
    kind = AutoModelForSequenceClassification if ours.config.num_labels else AutoModelForCausalLM
    theirs = kind.from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager").eval()
    logging.enable_progress_bar()
    ids_BT = probe_ids(ours.config)
    with torch.inference_mode():
        if ours.config.num_labels:  # without a padding token transformers scores one row at a time, at its last token
            error_frac = relative_error(ours(ids_BT[:1]).value[:, -1], theirs(ids_BT[:1]).logits)
        else:
            error_frac = relative_error(ours(ids_BT).value, theirs(ids_BT).logits)
    if not error_frac < _LARGEST_ERROR:
        raise SmaltiError(f"logits of {folder} differ from transformers': relative error {error_frac:.2e}")
    return error_frac


def _why_no_ema(run: Path, average: str | None) -> NoReturn:
    if average is not None:
        raise UserError(f"--ema and --average {average} are two means of the weights", allowed="one of them")
    raise UserError(
        f"the run {run} has no moving average of weights: it was trained without train.ema",
        hint="--average last:5 is the mean of its newest checkpoints",
    )


def _tokenizer(run: Path) -> str:
    if not (run / "tokenizer").is_dir():
        raise UserError(
            f"{run} has no tokenizer/ folder, without which the model cannot be used",
            hint=f"copy that of its data: cp -r DATA/tokenizer {run}/tokenizer",
        )
    return str(run / "tokenizer")


def _generation(run: Path) -> dict[str, Any] | None:
    """Return the sampling options for ``generate`` of the model that the run began with, if any."""
    path = run / "tokenizer" / "generation_config.json"
    return dict(store.read_json(path)) if path.is_file() else None


def _check_same(folder: Path, config: ModelConfig, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise an error unless the folder, read back, holds the config and the weights that were written."""
    source = open_folder(folder)
    described = FAMILIES[config.family].config_to_huggingface
    if described(source.config) != described(config):
        raise SmaltiError(f"config.json of the exported model differs when read back: {source.raw}")
    for name, tensor in source.tensors():
        if not tensor.isfinite().all():
            raise DataError(
                f"weight {name} of the exported model has values that are not finite in {tensor.dtype}",
                hint="export an earlier checkpoint, or in --dtype bf16 or fp32",
            )
        if not torch.equal(tensor, weights[name].to(dtype)):
            raise SmaltiError(f"weight {name} of the exported model differs when read back")


def _put_in_place(temporary: Path, final: Path) -> None:
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    if final.exists():
        os.replace(final, old)
    os.replace(temporary, final)
    shutil.rmtree(old, ignore_errors=True)
