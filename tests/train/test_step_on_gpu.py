"""On a GPU: nothing in a step waits for the device, dense and with experts, rows packed; also not where a loss is NaN,
which changes no bit."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from smalti.config.model import ModelConfig, MoEConfig
from smalti.config.optimizer import OptimizerConfig
from smalti.config.train import LossConfig
from smalti.distributed.group import mesh as meshes
from smalti.distributed.parallel import fsdp
from smalti.distributed.parallel.dtensors import local
from smalti.model.blocks.attention.scores import document_runs
from smalti.model.decoder import Decoder
from smalti.model.init import draw
from smalti.train.batches import Microbatch
from smalti.train.job import tensors_of
from smalti.train.loss import LanguageLoss
from smalti.train.optim import build_optimizer
from smalti.train.step import Loss, TrainState, train_step

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

SIZES = {"vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "dense": ModelConfig(**SIZES, intermediate_size=512),
    "experts": ModelConfig(
        **SIZES,
        family="decoder",
        intermediate_size=256,
        moe=MoEConfig(num_experts=8, num_experts_per_tok=2, balance_loss_coef=0.01, bias_update_rate=0.001),
    ),
}


@pytest.fixture
def world() -> object:
    torch.cuda.set_device(0)  # as pick_device does for a rank
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.usefixtures("world")
def test_nothing_in_the_step_waits_for_the_device(kind: str, optimizer: str) -> None:
    config, device = MODELS[kind], torch.device("cuda", 0)
    with torch.device("meta"):
        model = Decoder(config)
    fsdp.shard(model, meshes.build(device), compute="bf16", reduce="fp32")
    fsdp.materialize(model, device, lambda name, shape: draw(name, shape, config, 1))
    loss = LanguageLoss(config, LossConfig())
    described = OptimizerConfig.model_validate({"name": optimizer, "lr": 1e-3})
    state = TrainState(
        model, build_optimizer(model, described), lambda step: 1e-3, clip_norm=1.0, loss_state=loss.state
    )
    tokens = torch.randint(config.vocab_size, (4, 129), device=device)
    documents = (torch.rand(4, 128, device=device) < 0.05).cumsum(1)
    n_documents = int(document_runs(documents).sum())
    positions = torch.arange(128, device=device).expand(4, 128).contiguous()
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    microbatches = [Microbatch(inputs, targets, positions, documents, n_documents)] * 2
    for _ in range(2):  # what is chosen and made once
        train_step(state, microbatches, loss)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        results = [train_step(state, microbatches, loss) for _ in range(3)]
        good = [local(tensor).clone() for tensor in tensors_of(state).values()]
        bad = [train_step(state, microbatches, one) for one in (_spoilt(loss), loss)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(bool(torch.isfinite(result.loss)) for result in results)
    assert bool(bad[0].loss.isnan())
    assert all(torch.equal(old, local(new)) for old, new in zip(good, tensors_of(state).values(), strict=True))
    state.found_inf = None
    train_step(state, microbatches, loss)
    assert not torch.equal(good[0], local(next(iter(tensors_of(state).values()))))


def _spoilt(loss: Loss) -> Loss:
    def spoilt(model: Any, microbatch: Any) -> Any:
        total, weight, metrics = loss(model, microbatch)
        return total * float("nan"), weight, metrics

    return spoilt
