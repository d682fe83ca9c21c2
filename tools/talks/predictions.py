"""The planner's predictions for the talks' claims about scaling, networks, memory, MoEs, FSDP.

The numbers equal those that the commands print; runs are a recipe of the package or
changes to one, so that the commands need no file.
"""

from functools import cache, partial

from smalti.base.errors import UserError
from smalti.config.hardware import Hardware, hardware
from smalti.config.load import load
from smalti.config.run import RunConfig
from smalti.cost.axes import Layout
from smalti.cost.layout.predict import predict
from smalti.cost.layout.scaling import Curve, curve, dense_twin
from smalti.cost.layout.search import fastest_layout, find_layouts
from smalti.cost.memory.per_rank import memory_per_rank
from smalti.plan.serving.devices import distinct_experts

MPT = "demo model.preset=mpt-7b data.seq_len=2048 train.global_batch_tokens=1048576"
DBRX = "dbrx-132b"
MPT_30B = "demo model.preset=mpt-30b data.seq_len=2048 train.global_batch_tokens=4194304"
ROWS = "demo model.preset=dbrx-132b data.seq_len=4096 train.parallel.ranks=3072 train.parallel.replicate=48"


@cache
def _config(words: str) -> RunConfig:
    recipe, *overrides = words.split()
    return load(RunConfig, recipe, overrides=overrides).config


def _chosen(device: Hardware, config: RunConfig, gpus: int) -> tuple[Layout, int]:
    """The fastest layout with replicate and shard alone, or of all, as ``smalti plan scaling`` takes it."""
    try:
        return fastest_layout(config, device, gpus, data_alone=True)
    except UserError:
        return fastest_layout(config, device, gpus)


@cache
def _curve(words: str, gpu: str, gpus: tuple[int, ...], *, weak: bool, dense: bool = False) -> Curve:
    config, device = _config(words), hardware(gpu)
    if dense:
        config = config.model_copy(update={"model": dense_twin(config.model)})
    return curve(config, device, gpus, partial(_chosen, device), weak=weak)


def near_linear() -> str:
    """14.4 of 16."""
    last = _curve(MPT, "a100-40gb", (8, 128), weak=False).points[-1]
    return (
        f"MPT-7B with the same batch of 1M tokens on 8 and on 128 A100s with 200 Gbit/s each: {last.speed_up:.1f}x of "
        f"16, {last.efficiency_frac:.0%}. The talk's 14.4x are 90%; its model is not named"
    )


def slow_network() -> str:
    """5x slower by a misconfigured driver."""
    config, fast = _config(MPT), hardware("a100-40gb")
    layout, microbatch = _chosen(fast, config, 128)
    usual, longer = predict(config, fast, layout, microbatch).step_s, dict[int, float]()
    for part in range(1, 100):
        slow = fast.model_copy(update={"network_bytes_per_s": (fast.network_bytes_per_s or 0) / part})
        longer[part] = predict(config, slow, layout, microbatch).step_s / usual
    five = next(part for part, times in longer.items() if times >= 5)
    return (
        f"a step of MPT-7B on 128 A100s ({layout}) takes {longer[2]:.2g}x as long on half of 200 Gbit/s a device, "
        f"{longer[10]:.2g}x on a tenth, 5x on 1/{five} (the same command with a device file of less "
        "network_bytes_per_s)"
    )


def experts_beside_dense() -> str:
    """Nearly the same speed."""
    sparse, dense = (_curve(DBRX, "h100-sxm", (3072,), weak=True, dense=is_dense) for is_dense in (False, True))
    ratio = sparse.points[-1].prediction.tokens_per_s / dense.points[-1].prediction.tokens_per_s
    return (
        f"DBRX on 3,072 H100s, {sparse.points[-1].prediction.layout}, five rows of 4,096 tokens on each, makes "
        f"{ratio:.0%} of the tokens/s of a dense model of as many active parameters"
    )


def memory_saved() -> str:
    """Nearly 3x."""
    ratios = []
    for rows in (1, 2, 4):
        peaks = []
        for again in ("none", "full"):
            words = f"{ROWS} train.global_batch_tokens={3072 * 4096 * rows} train.microbatch_tokens={4096 * rows}"
            config = _config(f"{words} train.parallel.activation_checkpointing={again}")
            peaks.append(memory_per_rank(config, device="cuda").tensors_bytes)
        ratios.append(f"{peaks[0] / peaks[1]:.2g}x with {rows}")
    return (
        f"bytes of all tensors of a rank of DBRX, all blocks kept over all blocks run again: {', '.join(ratios)} rows "
        "of 4,096 tokens. Selective checkpointing and compressed activations are not built"
    )


def fsdp_beside_all() -> str:
    """Very, very close to 3D parallel strategies."""
    predictions = [row.prediction for row in find_layouts(_config(MPT_30B), hardware("h100-sxm"), 512).best]
    fsdp = [row for row in predictions if Layout(row.layout.replicate, row.layout.shard) == row.layout]
    others = [row for row in predictions if row not in fsdp]
    return (
        f"MPT-30B on 512 H100s: the best layout of FSDP alone, {fsdp[0].layout}, makes "
        f"{others[0].step_s / fsdp[0].step_s:.0%} of the tokens/s of the best that also cuts matrices or layers, "
        f"{others[0].layout}"
    )


def replicas() -> str:
    """Gathering slows down with the number of machines, so HSDP."""
    config, device = _config(MPT_30B), hardware("h100-sxm")
    tokens = 2048 * 4
    steps = {part: predict(config, device, Layout(replicate=part, shard=512 // part), tokens) for part in (1, 8)}
    hybrid, whole = steps[8], steps[1]
    return (
        f"a step of MPT-30B on 512 H100s with weights sharded over all: {whole.step_s / hybrid.step_s:.3g}x as long as "
        f"with 8 replicas of 64; the network shows for {whole.shares['network']:.0%} and "
        f"{hybrid.shares['network']:.0%} of it"
    )


def speed_of_a_smaller_one() -> str:
    """Quality of a bigger model, speed of a smaller one."""
    model = _config(DBRX).model
    experts = [f"{distinct_experts(model, batch) or 0:.1f} for {batch}" for batch in (1, 8, 64)]
    return (
        f"a decode step of DBRX reads of the 16 experts of a layer, were the router even, {', '.join(experts)} "
        "requests at a time: in FLOPs it is the smaller model always, in bytes only while few are served"
    )
