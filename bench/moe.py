"""One mixture-of-experts block, forward and backward: Smalti against transformers' DBRX and Mixtral blocks, 2 threads.

    make bench NAME=moe ARGS='--record'       # about 2 minutes
    python bench/moe.py --device cuda         # in bf16, with 16,384 tokens

All compute the same function of the same weights: 16 experts, 4 for a token, 2,048 tokens, width 512, 1,024 inside an
expert (SwiGLU). Outputs and gradients are compared first: in fp32 all of them, in bf16 those of the tokens that both
send to the same experts, which must be almost all (Smalti's router computes in fp32, theirs in bf16). A turn is a
forward and a backward pass to the input and to all weights; two blocks take turns in one process, which keeps freed
memory for the next turn (``distributed/group/allocator.py``), for the peers too. Smalti also computes the sums of its
balance losses.

Mixtral runs with each ``experts_implementation`` that fits the machine (``batched_mm`` copies three matrices for every
choice, 26 GB here in bf16, and is left out); the fastest counts.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from paired import Ratio, paired
from record import RecordOption, record
from torch import Tensor, nn
from transformers.models.dbrx.configuration_dbrx import DbrxConfig
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from smalti.config.model import ModelConfig
from smalti.distributed.group.allocator import keep_freed_memory
from smalti.model.blocks.moe import MoE
from smalti.model.dtypes import DTYPES

THREADS = 2
EXPERTS, TOP_K, TOKENS, WIDTH, INNER = 16, 4, 2048, 512, 1024
GPU_TOKENS = 16384
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
SAME_CHOICES_FRAC = 0.9

AIMS = {("bf16", "dbrx"): 2.0, ("bf16", "mixtral"): 1.15, ("fp32", "dbrx"): 1.0, ("fp32", "mixtral"): 1.0}

Block = Callable[[Tensor], Tensor]


def main() -> None:
    """Print a ratio for each peer and precision; ``--record`` also writes bench/results/moe.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--tokens", type=int, help=f"default: {TOKENS:,}; on a GPU {GPU_TOKENS:,}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=21, help="turns of each pair")
    parser.add_argument("--record", action=RecordOption, help="write bench/results/moe.json")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    keep_freed_memory()
    figures, on_gpu = {}, options.device == "cuda"
    tokens = options.tokens or (GPU_TOKENS if on_gpu else TOKENS)
    for precision in options.precision or (["bf16"] if on_gpu else DTYPES):
        print(f"{precision}: {EXPERTS} experts, top {TOP_K}, {tokens} tokens, {WIDTH} x {INNER}, {options.device}")
        ours, peers = blocks(DTYPES[precision])
        for block in (ours, *peers.values()):
            block.to(options.device)
        x_BTD, grad_BTD = (torch.randn(1, tokens, WIDTH).to(options.device, DTYPES[precision]) for _ in range(2))
        best: dict[str, Ratio] = {}
        for name, peer in peers.items():
            distance = check(ours, peer, x_BTD, precision)
            ratio = paired(
                turn(peer, x_BTD, grad_BTD), turn(ours, x_BTD, grad_BTD), names=(name, "smalti"), pairs=options.pairs
            )
            print(f"  {ratio}   outputs {distance:.1e} apart")
            family = name.split()[0]
            if family not in best or ratio.slow_s < best[family].slow_s:
                best[family] = ratio
            figures[f"{precision} {name}"] = ratio.figures()
        for family, ratio in best.items():
            aim = AIMS[precision, family]
            print(f"  {family} at its best: {ratio.ratio:.2f}x; aim {aim}: {'met' if ratio.ratio >= aim else 'MISSED'}")
    if options.record:
        print("wrote", record("moe-gpu" if on_gpu else "moe", figures))


def blocks(dtype: torch.dtype) -> tuple[nn.Module, dict[str, nn.Module]]:
    """Return Smalti's block, and the peers by name, all with the same weights."""
    torch.manual_seed(17)
    config = ModelConfig(
        family="decoder",
        vocab_size=2,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=8,
        moe={"num_experts": EXPERTS, "num_experts_per_tok": TOP_K},  # type: ignore[arg-type]
    )
    ours = MoE(config).to(dtype)
    router, experts = ours.router.weight.detach(), ours.experts
    ours.router.float()  # as in mixed precision
    assert experts.gate_proj is not None
    gate, up, down = (weight.detach() for weight in (experts.gate_proj, experts.up_proj, experts.down_proj))
    peers: dict[str, nn.Module] = {"dbrx": _dbrx(dtype, router, gate, up, down)}
    for implementation in ("eager", "grouped_mm"):
        peers[f"mixtral {implementation}"] = _mixtral(dtype, implementation, router, gate, up, down)
    return ours, peers


@torch.no_grad()
def _dbrx(dtype: torch.dtype, router: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> nn.Module:
    shape = {"hidden_size": WIDTH, "ffn_hidden_size": INNER, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K}
    block = DbrxFFN(DbrxConfig(d_model=WIDTH, ffn_config={**shape, "ffn_act_fn": {"name": "silu"}})).to(dtype)
    block.router.layer.weight.copy_(router)
    for theirs, ours in ((block.experts.mlp.w1, gate), (block.experts.mlp.v1, up), (block.experts.mlp.w2, down)):
        theirs.copy_(ours.flatten(0, 1))
    return block


@torch.no_grad()
def _mixtral(
    dtype: torch.dtype, implementation: str, router: Tensor, gate: Tensor, up: Tensor, down: Tensor
) -> nn.Module:
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_local_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config).to(dtype)
    block.gate.weight.copy_(router)
    block.experts.gate_up_proj.copy_(torch.cat([gate, up], dim=1))
    block.experts.down_proj.copy_(down.mT)
    return block


def run(block: nn.Module, x_BTD: Tensor) -> Tensor:
    """Return the output alone, [B, T, D]; Smalti's block also returns the sums of its balance losses."""
    result = block(x_BTD)
    out_BTD: Tensor = result[0] if isinstance(result, tuple) else result
    return out_BTD


def turn(block: nn.Module, x_BTD: Tensor, grad_BTD: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass with new gradients."""
    x_BTD = x_BTD.clone().requires_grad_()

    def work() -> None:
        x_BTD.grad = None
        block.zero_grad(set_to_none=True)
        run(block, x_BTD).backward(grad_BTD)
        if x_BTD.is_cuda:
            torch.cuda.synchronize()

    return work


def check(ours: nn.Module, peer: nn.Module, x_BTD: Tensor, precision: str) -> float:
    """Return the relative distance of the outputs and input gradients. Raises RuntimeError if it is too large."""
    results: list[Any] = []
    for block in (ours, peer):
        leaf = x_BTD.clone().requires_grad_()
        out = run(block, leaf)
        (gradient,) = torch.autograd.grad(out.double().square().sum(), leaf)
        results.append(torch.cat([out.detach(), gradient], dim=-1).flatten(0, 1).double())
    scale = torch.stack([f.square().mean().sqrt() for f in results[1].chunk(2, dim=-1)]).repeat_interleave(WIDTH)
    apart, size = (results[0] - results[1]) / scale, results[1] / scale
    near = apart.norm(dim=-1) < 10 * TOLERANCE[precision] * size.norm(dim=-1)
    distance = float(apart[near].norm() / size[near].norm())
    if near.double().mean() < (1.0 if precision == "fp32" else SAME_CHOICES_FRAC) or distance > TOLERANCE[precision]:
        raise RuntimeError(f"{precision}: only {float(near.double().mean()):.1%} of tokens agree; {distance:.1e} apart")
    return distance


if __name__ == "__main__":
    main()
