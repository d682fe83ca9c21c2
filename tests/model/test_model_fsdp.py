"""The decoder under FSDP2: built on meta, sharded by block and root, bfloat16, float32 sums."""

import pytest
import torch
import torch.distributed as dist
from model_cases import dense, distance, ids, sparse
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from smalti.model.decoder import Decoder
from smalti.model.init import draw, init_weights


@pytest.fixture
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def _loss(model, tokens, documents, mask):
    def head(hidden, weight):
        return (hidden @ weight.T).float().logsumexp(-1).sum()

    output = model(tokens, None, documents, mask_BT=mask, head=head)
    router = output.router.balance_sum + 0.1 * output.router.z_sum if output.router else 0.0
    return output.value + router, output.router


@pytest.mark.sample(2)
@pytest.mark.parametrize("config", [dense(), dense(tie_word_embeddings=True, qk_norm="head"), sparse(clip_qkv=8.0)])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
def test_sharded_block_by_block_gives_the_plain_gradients(mesh, config, param_dtype):
    with torch.device("meta"):
        sharded = Decoder(config)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    sharded.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in sharded.named_parameters():
            parameter.to_local().copy_(draw(name, parameter.shape, config, 1))
    plain = Decoder(config)
    init_weights(plain, config, 1)

    tokens = ids(config, 3, 24)
    documents = (torch.arange(24) // 9).expand(3, -1)
    mask = torch.rand(3, 24, generator=torch.Generator().manual_seed(0)) > 0.2
    loss, router = _loss(sharded, tokens, documents, mask)
    loss.backward()
    plain_loss, _ = _loss(plain, tokens, documents, mask)
    plain_loss.backward()
    if router is not None:
        assert router.z_sum.dtype == router.balance_sum.dtype == torch.float32
    exact = param_dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain_loss.detach()), rel=1e-6 if exact else 2e-2)
    ours = torch.cat([p.grad.to_local().flatten() for p in sharded.parameters()])
    assert ours.dtype == torch.float32
    assert distance(ours, torch.cat([p.grad.flatten() for p in plain.parameters()])) < (1e-6 if exact else 0.1)
