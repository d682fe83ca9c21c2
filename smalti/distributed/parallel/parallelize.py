"""How a plain model becomes a parallel one: every axis of the mesh, in the only order in which they work.

Names and global shapes of parameters never change, so initial weights, checkpoints and exports do not depend on the
mesh.
"""

from torch import nn

from smalti.config.parallel import ParallelConfig
from smalti.config.train import PrecisionConfig
from smalti.distributed.group.mesh import Mesh
from smalti.distributed.parallel import expert, fsdp, pipeline, sequence, tensor
from smalti.distributed.parallel.recompute import recompute
from smalti.model.dtypes import DTYPES


def parallelize(
    model: nn.Module, mesh: Mesh, parallel: ParallelConfig, precision: PrecisionConfig, *, compile_blocks: bool = False
) -> nn.Module:
    """Apply all axes of ``mesh`` to ``model``, in place unless its layers are split into pipeline stages. A collective.

    ``model`` is a ``Decoder`` on the meta device, or any ``nn.Module`` for replicate and shard alone. The sizes of the
    axes are those of ``mesh.layout``; ``parallel`` gives their options. An axis of size 1 changes nothing. The caller
    allocates the weights afterwards: ``fsdp.materialize`` draws them, ``fsdp.allocate`` leaves them to a checkpoint.
    UserError with the nearest size where the model does not allow one.
    """
    # First, so that the other axes apply to the layers of this rank's pipeline stages alone.
    compute = DTYPES[precision.compute]
    model = pipeline.apply(model, mesh, schedule=parallel.pipeline_schedule, compute=compute)
    # Before expert, which keeps this sharding of the experts' width. Makes matrices DTensors of the axis.
    tensor.apply(model, mesh)
    # Makes the experts' weights DTensors of the axis, and sends tokens to their ranks.
    expert.apply(model, mesh, dispatch=parallel.dispatch)
    # After tensor: attention over whole rows, for the heads of this tensor rank.
    sequence.apply(model, mesh, context=parallel.context)
    # Before FSDP, so that its all-gathers stay outside of what is compiled or recomputed.
    for block in fsdp.blocks_of(model):
        if parallel.activation_checkpointing == "full":
            recompute(block)
        if compile_blocks:
            block.compile()
    # Last: FSDP shards the final parameters (DTensors of the axes above) and replaces each module's class by a
    # subclass.
    return fsdp.shard(model, mesh, compute=precision.compute, reduce=precision.reduce)
