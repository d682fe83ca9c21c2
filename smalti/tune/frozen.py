"""A second, frozen model in a job: a reference or a teacher, sharded as the model that is trained."""

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from smalti.config.model import ModelConfig
from smalti.config.run import RunConfig
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.parallelize import parallelize
from smalti.model.decoder import Decoder
from smalti.train import rank_setup
from smalti.train.weights import open_weights


def frozen(source: str, model: ModelConfig, config: RunConfig, mesh: Mesh, device: torch.device) -> nn.Module:
    """Build the model of ``source`` (a run, a checkpoint or a Hugging Face folder) without gradients. A collective.

    Its embedding and output matrix stay gathered, so that a loss may use the latter after the forward pass.
    """
    with torch.device("meta"):
        decoder = Decoder(model).requires_grad_(False)
    compiles = rank_setup.compiles(config, device)
    sharded = parallelize(decoder, mesh, config.train.parallel, config.train.precision, compile_blocks=compiles)
    load = open_weights(source, sharded)
    fsdp.allocate(sharded, device)
    load()
    assert isinstance(sharded, FSDPModule)
    sharded.set_reshard_after_forward(False, recurse=False)
    return sharded.requires_grad_(False).eval()
