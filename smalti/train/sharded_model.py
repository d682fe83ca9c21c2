"""Builds the sharded model of a job: on the meta device, with its adapters, then its weights.

Weights are initialised, loaded from ``init_from``, or left to the checkpoint that will be loaded.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from smalti.base import log
from smalti.config.run import JobConfig, RunConfig
from smalti.cost.axes import Layout
from smalti.cost.params import count
from smalti.distributed.group import world as worlds
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.blocks.attention.choice import kernel_names
from smalti.model.blocks.embed import SCORES
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES
from smalti.model.init import draw
from smalti.train import adapters, frozen_origins, origin, rank_setup
from smalti.train.frozen_origins import Identities
from smalti.train.vocabulary import new_rows
from smalti.train.weights import open_weights


def sharded(
    config: JobConfig, own_model: nn.Module | None, mesh: Mesh, device: torch.device, *, resumes: bool
) -> nn.Module:
    """Build the sharded model. Weights are initialised, or left uninitialised if a checkpoint will be loaded.

    own_model: the caller's model, with the weights of rank 0; None builds that of the config. With adapters, the frozen
    weights are loaded in both cases.
    """
    model = own_model
    if model is None:
        assert isinstance(config, RunConfig)
        with torch.device("meta"):
            model = Decoder(config.model)
        adapters.add(model, config)
    else:
        adapters.refuse_own_model(config)
        model.to(device)
        fsdp.broadcast(model)
    train = config.train
    compiles = rank_setup.compiles(config, device)
    model = parallelize(model, mesh, train.parallel, train.precision, compile_blocks=compiles)
    # the meta device is that of a rehearsal, which needs no values
    keeps_own = resumes and (device.type == "meta" or not adapters.has_adapter(config))
    load = None if config.init_from is None or keeps_own else _open_origin(config, model)
    if own_model is None and (resumes or load is not None):
        fsdp.allocate(model, device)
    if load is not None:
        _draw_scores(model, config)
        load()
        if not resumes:
            adapters.init(model, config)
    elif not resumes and own_model is None:
        assert isinstance(config, RunConfig)
        described = config.model
        seed = config.seed
        fsdp.materialize(model, device, lambda name, shape: draw(name, shape, described, seed))
    return model


def _draw_scores(model: nn.Module, config: JobConfig) -> None:
    """Set the scores of a reward model, if it is one, to their initial values."""
    for name, parameter in model.named_parameters():
        if name == SCORES and isinstance(config, RunConfig):
            with torch.no_grad():
                fsdp.assign(parameter, draw(name, parameter.shape, config.model, config.seed))


def describe(config: JobConfig, layout: Layout, device: torch.device) -> dict[str, Any]:
    """Return the numbers of parameters, and the attention kernel of each kind of layer over the longest rows; empty for
    a model that the config does not describe."""
    if not isinstance(config, RunConfig):
        return {}
    params = count(config.model)
    dtype = DTYPES[config.train.precision.compute]
    tokens = max(config.data.seq_lens)
    packed = config.data.mask_documents
    kernels: dict[str, str] = dict(kernel_names(config.model, device, dtype, tokens, documents=packed))
    if layout.sequence > 1 and config.train.parallel.context == "ring":
        kernels = dict.fromkeys(kernels, "ring")
    return {"params_total": params.total, "params_active": params.active, "attention": kernels}


def _open_origin(config: JobConfig, model: nn.Module) -> Callable[[], None]:
    assert isinstance(config, RunConfig)
    assert config.init_from is not None
    return open_weights(config.init_from, model, worlds.broadcast_from_rank0(lambda: new_rows(config)))


def check_origin(
    config: JobConfig, path: str | None, origins: Mapping[str, str] | None, *, own_model: bool
) -> Identities:
    """Check ``init_from`` of a run that begins, and the weights that are read on every attempt; returns the latter."""
    if path is None and not own_model:
        assert isinstance(config, RunConfig)
        for line in worlds.broadcast_from_rank0(lambda: origin.check(config, origins)):
            log.get("train").warning("%s", line)
    return frozen_origins.check(config, path)
