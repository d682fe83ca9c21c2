"""What can be known to be wrong with a run before a process of it starts, and the plan of one that is right."""

from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_count

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.inputs import Inputs


def check(config: "RunConfig", *, ranks: int) -> "Inputs":
    """Raise for a mesh that does not fit ``ranks``, missing or foreign tokens, a vocabulary that is too small, stages
    that do not fit the run, and weights to begin with that are not there."""
    from smalti.data.inputs import check_inputs

    _check_mesh(config, ranks)
    if config.init_from is not None and not _has_checkpoint(config) and not Path(config.init_from).exists():
        raise DataError(f"init_from = {config.init_from} does not exist", allowed="a checkpoint or Hugging Face folder")
    _check_stages(config)
    return check_inputs(config)


def _check_mesh(config: "RunConfig", ranks: int) -> None:
    # dist.mesh.check_fits says the same to ranks of a foreign launcher; this one is here because that imports torch.
    replicate = config.train.parallel.replicate
    if ranks % replicate:
        divisors = [str(n) for n in range(1, ranks + 1) if ranks % n == 0]
        raise UserError(
            f"train.parallel.replicate={replicate} does not divide the {ranks} ranks",
            allowed=f"a divisor of {ranks}: {', '.join(divisors)}",
            hint=f"train.parallel.replicate={max(int(n) for n in divisors if int(n) <= replicate)}",
        )


def _check_stages(config: "RunConfig") -> None:
    """The stages of the mixture over the run's length, as the stream will lay them out."""
    from smalti.config.durations import total_steps
    from smalti.data.mixture import build_schedule

    batch_tokens = config.train.global_batch_tokens
    steps = total_steps(config.train.duration, global_batch_tokens=batch_tokens)
    sequences = batch_tokens // config.data.seq_len
    build_schedule(config.data, steps * sequences, sequences)


def _has_checkpoint(config: "RunConfig") -> bool:
    """A run that goes on from its own checkpoint does not read ``init_from`` again."""
    return any(Path(config.run_folder).glob("checkpoints/step-*/COMPLETE"))


def plan_text(config: "RunConfig", checked: "Inputs", *, ranks: int) -> str:
    """What would be started, in lines for people."""
    from smalti.data.mixture import tokens_by_source
    from smalti.plan.budget import budget

    numbers = budget(config)
    taken = tokens_by_source(
        config.data, total_steps=numbers.steps, global_batch_tokens=config.train.global_batch_tokens
    )
    lines = [
        f"run        {config.name}  ->  {config.run_folder}{_existing(config)}",
        f"model      {config.model.family}, {format_count(numbers.params.total)} parameters, "
        f"{format_count(numbers.params.active)} active",
        f"length     {numbers.steps} steps x {config.train.global_batch_tokens} tokens "
        f"= {format_count(numbers.tokens)} tokens, {format_count(numbers.total_flops)} FLOPs",
        f"placement  {ranks} ranks on {config.train.parallel.device}, replicate {config.train.parallel.replicate}",
    ]
    for name, manifest in checked.sources.items():
        epochs = taken[name] / manifest.n_tokens
        lines.append(f"source     {name}: {format_count(manifest.n_tokens)} tokens, {epochs:.2f} epochs")
    for name, manifest in checked.heldout.items():
        lines.append(f"held out   {name}: {format_count(manifest.n_tokens)} tokens")
    return "\n".join(lines)


def _existing(config: "RunConfig") -> str:
    return "  (exists: would resume)" if (Path(config.run_folder) / "config.yaml").exists() else ""
