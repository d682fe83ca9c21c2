"""``smalti plan memory``: the bytes on one rank, in print."""

from smalti.cli.plan_recipe import Gpu, Json, Overrides, Recipe, load_recipe


def memory(recipe: Recipe, overrides: Overrides = None, gpu: Gpu = None, as_json: Json = False) -> None:
    """Print the bytes on one rank: weights, gradients, moments, activations, logits."""
    from smalti.base.units import format_bytes, format_frac
    from smalti.cli.tables import pairs, print_json
    from smalti.config.hardware import hardware
    from smalti.plan.memory import memory_per_rank

    config = load_recipe(recipe, overrides)
    parts = memory_per_rank(config)
    capacity = hardware(gpu).available_memory_bytes if gpu else None
    if as_json:
        print_json({"name": config.name, **parts.to_json(), "device_memory_bytes": capacity})
        return
    parallel = config.train.parallel
    lines = [("ranks", f"{parallel.ranks} (replicate {parallel.replicate})")]
    lines += [("microbatch", f"{parts.microbatch_tokens} tokens")]
    for name, value in parts.to_json().items():
        if name.endswith("_bytes"):
            lines.append((name.removesuffix("_bytes"), format_bytes(value)))
    if capacity is not None:
        share = format_frac(parts.total_bytes / capacity)
        lines.append(("of device", f"{share} of {format_bytes(capacity)}; leave 2 to 6 GB for CUDA and NCCL"))
    print(pairs(lines))
