"""Loads the weights of ``init_from``, tensor by tensor, into a model that may be sharded.

Guarantees: all weights are checked (names, shapes, digests or finite values) before any is loaded, and an error of one
rank is raised on all. A rank has no more in memory than its part of the model and the tensors of one conversion rule.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from smalti.base import store
from smalti.base.errors import DataError
from smalti.distributed.checkpoint import checkpoint
from smalti.distributed.group import world
from smalti.distributed.parallel import fsdp, pipeline
from smalti.model.adapters.apply import is_adapter, stored_as
from smalti.model.blocks.embed import SCORES
from smalti.model.decoder import Decoder
from smalti.model.huggingface import ModelFolder, companion_files, open_folder
from smalti.model.json_file import read_object
from smalti.train.origin import holds_adapters, run_of
from smalti.train.vocabulary import NewRows

_TOKENIZER_CONFIG = "tokenizer_config.json"


def open_weights(source: str, model: nn.Module, rows: NewRows | None = None) -> Callable[[], None]:
    """Check ``source`` (a Hugging Face folder, a run, a checkpoint); returns the function that loads it into ``model``.

    A collective. ``model`` needs storage when the function is called. Only weights are loaded; names and shapes must be
    those of the model, but for ``rows`` of new entries of the vocabulary. A reward model may begin with a language
    model, whose output head it does not have; its scores are not changed then.
    """
    wanted = _plain_shapes(model)
    if world.broadcast_from_rank0(lambda: os.path.isfile(f"{source}/config.json")):
        folder = world.together(lambda: _checked_folder(source, wanted, rows))
        return lambda: _load_folder(folder, model, rows)
    path = find_checkpoint(source)
    shapes = world.broadcast_from_rank0(lambda: checkpoint.shapes(path))
    world.together(lambda: _check_fits(source, shapes, wanted))
    return lambda: _load_checkpoint(path, model, set(shapes))


def find_checkpoint(source: str | Path) -> str:
    """Return the newest checkpoint of a run, or ``source`` if it is one, with checked digests. A collective."""
    if world.broadcast_from_rank0(lambda: os.path.isfile(f"{source}/train_state.json")):
        problem = checkpoint.fault(source, shared=True)
        if problem is not None:
            raise DataError(f"checkpoint {source} cannot be used: {problem}", hint="name another one")
        return str(source)
    newest = checkpoint.newest(f"{source}/checkpoints", shared=True)
    if newest is None:
        raise DataError(
            f"init_from={source} is none of: a run folder with a checkpoint, a checkpoint, a Hugging Face folder",
            hint="init_from=runs/NAME or init_from=runs/NAME/checkpoints/step-NNNNNNNN",
        )
    return newest


def keep_tokenizer(source: str, target: Path, init_from: str | None) -> None:
    """Copy the tokenizer into the run folder once, so that the run can be exported without its data.

    The chat template and sampling defaults of ``init_from`` (a Hugging Face folder or a run) are copied too.
    """
    if target.exists():
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copytree(source, temporary, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin", "*.pt", "*.pth"))
    if init_from is not None:
        _keep_beside(init_from, temporary)
    os.replace(temporary, target)


def _keep_beside(init_from: str, target: Path) -> None:
    run = run_of(Path(init_from))
    folder = Path(init_from) if run is None else run / "tokenizer"
    for name, data in companion_files(folder).items():
        if ("template" in name or name == "generation_config.json") and not (target / name).exists():
            store.write_bytes(target / name, data)
    # Many folders of the Hugging Face Hub have the template in this file.
    theirs, mine = (
        read_object(path) if path.exists() else {} for path in (folder / _TOKENIZER_CONFIG, target / _TOKENIZER_CONFIG)
    )
    if "chat_template" in theirs and "chat_template" not in mine:
        store.write_json(target / _TOKENIZER_CONFIG, mine | {"chat_template": theirs["chat_template"]})


def _checked_folder(source: str, wanted: pipeline.Shapes, rows: NewRows | None) -> ModelFolder:
    folder = open_folder(source)
    shapes = folder.shapes()
    if rows is not None:
        shapes = {name: rows.shape(name, shape) for name, shape in shapes.items()}
    _check_fits(source, shapes, wanted)
    folder.check_values(dist.get_rank(), dist.get_world_size())
    return folder


def _load_folder(folder: ModelFolder, model: nn.Module, rows: NewRows | None) -> None:
    wanted = model.state_dict()
    for name, tensor in folder.tensors():
        _assign(wanted, name, tensor if rows is None else rows.fill(name, tensor))


def _load_checkpoint(path: str, model: nn.Module, names: set[str]) -> None:
    """Load what the model holds as it is in place, in parts; quantised weights one by one."""
    wanted = model.state_dict()
    checkpoint.load(path, {f"model.{name}": value for name, value in wanted.items() if name in names})
    if quantized := [name for name in names if f"{name}_codes" in wanted]:
        weights = checkpoint.StoredModel(path, verified=True)  # by find_checkpoint
        for name in quantized:
            _assign(wanted, name, weights[name])


def _assign(wanted: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    with torch.no_grad():
        for target, value in stored_as(wanted, name, tensor).items():
            fsdp.assign(wanted[target], value.to(wanted[target].dtype))


def _plain_shapes(model: nn.Module) -> pipeline.Shapes:
    """Return names and shapes of the tensors of a model, without adapters and before quantisation. A collective."""
    shapes = pipeline.whole_shapes(model)
    if isinstance(model, Decoder) and any(map(is_adapter, shapes.parameters)):
        with torch.device("meta"):
            return pipeline.whole_shapes(Decoder(model.config))
    return shapes


def _check_fits(source: str, shapes: dict[str, tuple[int, ...]], model: pipeline.Shapes) -> None:
    wanted = model.parameters | model.buffers
    needed = set(model.parameters)  # a buffer may keep its initial value
    if SCORES in needed and SCORES not in shapes:  # a reward model that begins as a language model
        needed.remove(SCORES)
        shapes = {name: shape for name, shape in shapes.items() if name != "lm_head.weight"}
    if any(map(is_adapter, shapes)):
        raise holds_adapters(source)
    unpaired = sorted((set(shapes) - set(wanted)) | (needed - set(shapes)))
    if unpaired:
        where = f"init_from={source}" if unpaired[0] in shapes else "the model"
        raise DataError(
            f"weight '{unpaired[0]}' is only in {where} ({len(unpaired)} weights have no counterpart)",
            allowed="a model section of the same shape as the weights",
            hint="copy the model section of the run that the weights come from",
        )
    for name, shape in shapes.items():
        if wanted[name] != shape:
            raise DataError(
                f"weight '{name}' of init_from={source} has shape {shape}; that of the model section is {wanted[name]}"
            )
