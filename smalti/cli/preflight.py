"""What can be known to be wrong with a run before a process of it starts, and the plan of one that is right."""

from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_count

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.inputs import Inputs


def check(config: "RunConfig", *, ranks: int) -> "Inputs":
    """Raise for a mesh that does not fit ``ranks``, missing or foreign tokens, a vocabulary that is too small."""
    from smalti.data.inputs import check_inputs

    replicate = config.train.parallel.replicate
    if ranks % replicate:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise UserError(
            f"train.parallel.replicate={replicate} does not divide the {ranks} ranks",
            allowed=f"a divisor of {ranks}: {', '.join(divisors)}",
            hint="change train.parallel.replicate or train.parallel.ranks",
        )
    if config.init_from is not None and not Path(config.init_from).exists():
        raise DataError(f"init_from = {config.init_from} does not exist", allowed="a checkpoint or Hugging Face folder")
    return check_inputs(config)


def plan_text(config: "RunConfig", checked: "Inputs", *, ranks: int) -> str:
    """What would be started, in lines for people."""
    from smalti.plan.budget import budget, epochs_by_source

    numbers = budget(config)
    sizes = {name: manifest.n_tokens for name, manifest in checked.sources.items()}
    epochs = epochs_by_source(config, sizes)
    lines = [
        f"run        {config.name}  ->  {config.run_folder}{_existing(config)}",
        f"model      {config.model.family}, {format_count(numbers.params.total)} parameters, "
        f"{format_count(numbers.params.active)} active",
        f"length     {numbers.steps} steps x {config.train.global_batch_tokens} tokens "
        f"= {format_count(numbers.tokens)} tokens, {format_count(numbers.total_flops)} FLOPs",
        f"placement  {ranks} ranks on {config.train.parallel.device}, replicate {config.train.parallel.replicate}",
    ]
    for name, manifest in checked.sources.items():
        lines.append(f"source     {name}: {format_count(manifest.n_tokens)} tokens, {epochs.get(name, 0.0):.2f} epochs")
    for name, manifest in checked.heldout.items():
        lines.append(f"held out   {name}: {format_count(manifest.n_tokens)} tokens")
    return "\n".join(lines)


def _existing(config: "RunConfig") -> str:
    return "  (exists: would resume)" if (Path(config.run_folder) / "config.yaml").exists() else ""
