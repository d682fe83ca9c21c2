"""What can be known to be wrong with a run before a process of it starts, and the plan of one that is right."""

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_count

if TYPE_CHECKING:
    from smalti.config.run import RunConfig
    from smalti.data.inputs import Inputs


def check(config: "RunConfig", *, ranks: int) -> "Inputs":
    """Raise for a mesh that does not fit ``ranks``, missing or foreign tokens, a vocabulary that is too small, stages
    that do not fit the run, weights to begin with that are not there, trackers that do not answer, and a folder that
    holds another run."""
    from smalti.data.inputs import check_inputs
    from smalti.track import trackers
    from smalti.track.run import RunFolder

    _check_run_folder(config.run_folder)
    RunFolder(config.run_folder).require_free_or_same(config)
    _check_mesh(config, ranks)
    if config.init_from is not None and not _has_checkpoint(config) and not Path(config.init_from).exists():
        raise DataError(f"init_from = {config.init_from} does not exist", allowed="a checkpoint or Hugging Face folder")
    _check_stages(config)
    _check_folders(config)
    trackers.check(config.track, config.run_folder)
    return check_inputs(config)


def _check_run_folder(folder: str) -> None:
    """OSError, as making the folder would raise it: a file is in the way, or nothing may be written there."""
    from smalti.base import store

    if store.is_local(folder):
        there = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            number = errno.EACCES if there.is_dir() else errno.ENOTDIR
            raise OSError(number, os.strerror(number), str(there))


def _check_folders(config: "RunConfig") -> None:
    """Folders of token files that do not exist, seen from here: a recipe's relative paths begin where one stands."""
    from smalti.base import store

    for section in ("sources", "heldout"):
        for name, folder in getattr(config.data, section).items():
            if store.is_local(folder) and not Path(folder).exists():
                of_demo = Path(folder).parts[:2] == ("data", "demo")
                raise DataError(
                    f"data.{section}.{name} = {folder} does not exist (seen from {Path.cwd()})",
                    allowed="a folder of token files",
                    hint="smalti demo writes it" if of_demo else "smalti data tokenize RECIPE writes token files",
                )


def not_exportable(config: "RunConfig") -> str | None:
    """Why the model of this run could not be exported, with what to do; None where it can be."""
    if config.model.family == "decoder":
        return "family decoder has no Hugging Face form: no export, eval or chat"
    if config.data.tokenizer is None and not (Path(config.run_folder) / "tokenizer").is_dir():
        return "this run keeps no tokenizer: smalti export will not work; add data.tokenizer=OUTPUT/tokenizer"
    return None


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
    count = f"{ranks} {'rank' if ranks == 1 else 'ranks'}"
    lines = [
        f"run        {config.name}  ->  {config.run_folder}{_existing(config)}",
        f"model      {config.model.family}, {format_count(numbers.params.total)} parameters, "
        f"{format_count(numbers.params.active)} active",
        f"length     {numbers.steps} steps x {config.train.global_batch_tokens} tokens "
        f"= {format_count(numbers.tokens)} tokens, {format_count(numbers.total_flops)} FLOPs",
        f"placement  {count} on {config.train.parallel.device}, replicate {config.train.parallel.replicate}",
    ]
    for name, manifest in checked.sources.items():
        epochs = taken[name] / manifest.n_tokens
        lines.append(f"source     {name}: {format_count(manifest.n_tokens)} tokens, {epochs:.2f} epochs")
    for name, manifest in checked.heldout.items():
        lines.append(f"held out   {name}: {format_count(manifest.n_tokens)} tokens")
    reason = not_exportable(config)
    if reason is not None:
        lines.append(f"warning    {reason}")
    return "\n".join(lines)


def _existing(config: "RunConfig") -> str:
    from smalti.track.run import RunFolder

    folder = RunFolder(config.run_folder)
    if not (folder.path / "config.yaml").exists():
        return ""
    step = folder.saved_step()
    return f"  (exists: would resume from step {step})" if step is not None else "  (exists: would start at step 0)"
