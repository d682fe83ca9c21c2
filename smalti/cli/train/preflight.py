"""Checks a run before its processes start, and prints the plan of ``--dry-run``."""

import errno
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from smalti.base.errors import DataError, UserError
from smalti.base.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from smalti.config.fork import Fork
    from smalti.config.run import RunConfig
    from smalti.data.stream.inputs import Inputs
    from smalti.fleet.agent.watchdog import Limits

_STORE_FLOOR_S = 120.0
"""Requests to a store that fails are repeated for about so long."""
_COMPILE_FLOOR_S = 120.0


def check(
    config: "RunConfig", *, ranks: int, fork: "Fork | None" = None, origins: "Mapping[str, str] | None" = None
) -> None:
    """Raise for what cannot be trained on ``ranks``: the mesh, stages, folders of tokens or of initial weights, faults,
    trackers, and a folder of another run. ``origins``: of the config's values."""
    from smalti.base.env import inside_world
    from smalti.config.chaos_needs import require_possible
    from smalti.track import trackers
    from smalti.track.names import require_evaluated
    from smalti.track.run import RunFolder

    _check_run_folder(config.run_folder)
    if fork is None:
        RunFolder(config.run_folder).require_free_or_same(config)
    _check_stages(config)
    config.data.require_every_source_used()
    _check_mesh(config, ranks)
    _check_nodes(config, ranks)
    origin_warnings(config, origins)
    require_evaluated(config.train.checkpoint.best, config.data.heldout, has_ema=config.train.ema is not None)
    _check_retained(config)
    _check_folders(config)
    _check_files(config)
    require_possible(config, by_agent=not inside_world(), one_machine=not inside_world() and config.train.nodes is None)
    trackers.check(config.track, config.run_folder)


def fits(config: "RunConfig", ranks: int) -> bool:
    """Return whether the run can be laid out on so many ranks."""
    try:
        _check_mesh(config, ranks)
    except UserError:
        return False
    return True


def limits(config: "RunConfig") -> "Limits":
    """Return the limits after which a rank is taken for hanging: longer where it may wait for a store or compile."""
    from smalti.config.durations import to_seconds
    from smalti.fleet.agent.watchdog import Limits
    from smalti.track.progress import TRAINING, Phase

    parallel = config.train.parallel
    initial_s, floor_s = to_seconds(parallel.timeout), to_seconds(config.train.restart.hang_floor)
    assert initial_s is not None and floor_s is not None
    floors_s = {} if data_is_local(config) else {Phase.DATA: max(floor_s, _STORE_FLOOR_S)}
    has_gpu = parallel.device != "cpu" and any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd"))
    if parallel.compile is True or (parallel.compile == "auto" and has_gpu):  # another shape is compiled again
        floors_s |= {phase: max(floor_s, _COMPILE_FLOOR_S) for phase in TRAINING}
    return Limits(floor_s, initial_s, floors_s=floors_s)


def origin_warnings(config: "RunConfig", origins: "Mapping[str, str] | None" = None) -> list[str]:
    """Return warnings of differences from the model that the run starts from; raises for those not allowed."""
    resumes = _has_checkpoint(config)
    if config.init_from is None or (resumes and config.adapter is None):  # it resumes from its own checkpoint
        return []
    if not Path(config.init_from).exists():
        raise DataError(
            f"init_from = {config.init_from} does not exist",
            allowed="a checkpoint or Hugging Face folder",
            hint="init_from=runs/NAME/export after 'smalti export runs/NAME', or runs/NAME/checkpoints/step-NNNNNNNN",
        )
    if resumes:
        return []
    from smalti.train import origin

    return origin.check(config, origins)


def _check_retained(config: "RunConfig") -> None:
    """Raise if a resumed run would measure data.retain differently from before its first step."""
    from smalti.track.report.continued import require_same_settings
    from smalti.track.report.read import read_run
    from smalti.track.run import RunFolder

    if config.data.retain and 0 < (RunFolder(config.run_folder).saved_step() or 0) < config.length.total_steps:
        require_same_settings(read_run(config.run_folder), config.model_dump(mode="json"), list(config.data.retain))


def data_is_local(config: "RunConfig") -> bool:
    """Return whether all data of the run is in local folders. Data in a store is checked by rank 0 instead, so that the
    job reads each index once rather than once per node."""
    from smalti.base import store

    sources = config.data.sources.values()
    paths = [path for source in sources for path in (source.path, *source.mirrors)]
    return all(store.is_local(path) for path in (*paths, *config.data.heldout.values()))


def check_machine(config: "RunConfig") -> list[str]:
    """Raise for a device or shared memory that this machine lacks, and for problems of local data; returns warnings."""
    from smalti.fleet.agent.memory import require_room

    _check_device(config)
    require_room(config)
    return check_local_data(config)


def check_local_data(config: "RunConfig") -> list[str]:
    """Raise for problems of local data; returns warnings of sources with too many epochs."""
    from smalti.cli.plan.data import repeat_warnings
    from smalti.data.stream.inputs import check_inputs

    return repeat_warnings(config, check_inputs(config).sources) if data_is_local(config) else []


def _check_device(config: "RunConfig") -> None:
    """Raise UserError for device=cuda on a machine without a usable GPU."""
    from smalti.fleet.machine import why_no_gpu

    reason = why_no_gpu() if config.train.parallel.device == "cuda" else None
    if reason is not None:
        raise UserError(
            f"train.parallel.device=cuda, but {reason}",
            allowed="auto, cpu",
            hint="train.parallel.device=auto; 'smalti env' shows what PyTorch and the driver see",
        )


def _check_run_folder(folder: str) -> None:
    """Raise the OSError that creating the folder would raise: a file in its place, a read-only disk, no permission."""
    from smalti.base import store

    if store.is_local(folder):
        existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK):
            denied = errno.EROFS if os.statvfs(existing).f_flag & os.ST_RDONLY else errno.EACCES
            number = denied if existing.is_dir() else errno.ENOTDIR
            raise OSError(number, os.strerror(number), str(existing))


def _check_folders(config: "RunConfig") -> None:
    """Raise DataError for folders of token files that do not exist, seen from the current directory."""
    from smalti.base import store
    from smalti.data.stream.inputs import require_heldout
    from smalti.data.stream.open import prefix_errors

    for name, folder in config.data.heldout.items():
        with prefix_errors(f"data.heldout.{name} = {folder}"):
            require_heldout(folder)
    for section in ("sources", "heldout"):
        for name, source in getattr(config.data, section).items():
            folder = source if isinstance(source, str) else source.path
            if store.is_local(folder) and not Path(folder).exists():
                of_demo = Path(folder).parts[:2] == ("data", "demo")
                raise DataError(
                    f"data.{section}.{name} = {folder} does not exist (seen from {Path.cwd()})",
                    allowed="a folder of token files",
                    hint="smalti demo writes it" if of_demo else "smalti data tokenize RECIPE writes token files",
                )


def _check_files(config: "RunConfig") -> None:
    """Raise for a missing list of takedowns, and for a cache folder that cannot be used."""
    from smalti.base import store

    takedowns = config.data.takedowns
    cache = config.data.fetch.cache
    if takedowns is not None and store.is_local(takedowns) and not Path(takedowns).is_file():
        raise DataError(
            f"data.takedowns = {takedowns} is not a file (seen from {Path.cwd()})",
            allowed='a file with lines such as {"source": "web", "document": 1234}',
            hint="name a file, or leave data.takedowns out",
        )
    if cache is None:
        return
    if not store.is_local(cache):
        raise UserError(
            f"data.fetch.cache={cache} is not a local folder",
            allowed="a folder on a disk of the node",
            hint="data.fetch.cache=/tmp/smalti",
        )
    existing = next(path for path in (Path(cache), *Path(cache).absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"data.fetch.cache={cache} cannot be used: {existing}: {error.strerror}",
            allowed="a folder that can be made and written",
            hint="name another one, or leave data.fetch.cache out",
        ) from error


def not_exportable(config: "RunConfig") -> str | None:
    """Return why the model of this run cannot be exported, and the fix; None where it can be."""
    if config.model.family == "decoder":
        return "family decoder has no Hugging Face form: no export, eval or chat"
    if config.data.tokenizer is None and not (Path(config.run_folder) / "tokenizer").is_dir():
        return "this run has no tokenizer: smalti export will not work; add data.tokenizer=OUTPUT/tokenizer"
    return None


def only_merged(config: "RunConfig") -> str | None:
    """Return why the adapters of this run can be exported only merged into their base, and how; None for others."""
    if config.adapter is None or config.model.family == "decoder":
        return None
    from smalti.model.adapters import peft

    reason = peft.why_no_format(config.model, config.adapter)
    return None if reason is None else f"{reason}; the run can be exported with --merge alone"


def _check_mesh(config: "RunConfig", ranks: int) -> None:
    from smalti.cli.train.local_layout import local_layout

    local_layout(config, ranks)
    least = config.train.restart.min_ranks
    if least is not None and least > ranks:
        raise UserError(
            f"train.restart.min_ranks={least} is more than train.parallel.ranks={ranks}",
            allowed=f"1 to {ranks}",
            hint=f"train.restart.min_ranks={max(1, ranks - 1)}",
        )


def _check_nodes(config: "RunConfig", ranks: int) -> None:
    """Raise UserError for ranks that nodes cannot share equally, and for what agents of several nodes do not do."""
    nodes, checkpoint = config.train.nodes, config.train.checkpoint
    if nodes is None:
        return
    if ranks % nodes.count:
        near = max(1, round(ranks / nodes.count)) * nodes.count
        raise UserError(
            f"train.parallel.ranks={ranks} cannot be divided over train.nodes.count={nodes.count} in equal parts",
            allowed="a multiple of the nodes",
            hint=f"train.parallel.ranks={near}",
        )
    if checkpoint.peer_node is not None:
        raise UserError(
            f"train.checkpoint.peer_node={checkpoint.peer_node} has no effect with train.nodes",
            allowed="train.checkpoint.peer_copies alone: each node holds the copies of another one",
            hint="train.checkpoint.peer_node=null",
        )


def _check_stages(config: "RunConfig") -> None:
    """Raise for stages of the mixture that do not fit the length of the run."""
    from smalti.data.order.schedule import build_schedule

    build_schedule(config.data, config.length)


def _has_checkpoint(config: "RunConfig") -> bool:
    from smalti.track.run import RunFolder

    return RunFolder(config.run_folder).saved_step() is not None


def dry_run(config: "RunConfig", *, ranks: int, fork: "Fork | None", gpu: str | None, as_json: bool) -> None:
    """Print what would be started, and what one of its ranks would hold and send.

    The JSON has the rehearsal alone and reads no store. In the text, problems of the data come last; they are no error
    where ``gpu`` plans for another machine.
    """
    if gpu is not None:
        from smalti.config.hardware import hardware

        hardware(gpu)  # reject an unknown name before anything is printed
    from smalti.cli.tables import print_json
    from smalti.cli.train.rehearsal import rehearsal_json, rehearsal_lines
    from smalti.data.stream.inputs import check_inputs

    if as_json:
        warnings = check_local_data(config)
        print_json({**rehearsal_json(config, gpu=gpu), "warnings": warnings})
        return
    try:
        print(plan_text(config, check_inputs(config), ranks=ranks, fork=fork, check_memory=gpu is None))
    except UserError as error:
        if data_is_local(config):
            raise
        print("\n".join(rehearsal_lines(config, gpu=gpu)))  # a machine without access to the data can still rehearse
        if gpu is None:
            raise
        print(f"data       not checked: {error.message}")
        return
    print("\n".join(rehearsal_lines(config, gpu=gpu)))


def plan_text(
    config: "RunConfig", checked: "Inputs", *, ranks: int, fork: "Fork | None" = None, check_memory: bool = True
) -> str:
    """Return the plan of a run as text, with the changes of a fork. ``check_memory``: warn if this machine has too
    little memory."""
    from smalti.cli.plan.data import dry_run_lines
    from smalti.cli.train.local_layout import layout_lines
    from smalti.cli.train.local_memory import memory_warning
    from smalti.plan.run_plan import length_text, plan_run

    numbers = plan_run(config)
    lines = [
        f"run        {config.name}  ->  {config.run_folder}{_existing(config)}",
        f"model      {config.model.family}, {format_count(numbers.params.total)} parameters, "
        f"{format_count(numbers.params.active)} active",
        f"length     {length_text(config.length)} = {format_count(numbers.tokens)} tokens, "
        f"{format_count(numbers.total_flops)} FLOPs",
        *_origin_lines(config),
        *_fork_lines(fork),
        *layout_lines(config, ranks),
    ]
    lines += dry_run_lines(config, checked.sources)
    lines += _order_lines(config, checked)
    for name, manifest in checked.heldout.items():
        lines.append(f"held out   {name}: {format_count(manifest.n_tokens)} tokens")
    lines += [f"warning    {line}" for line in (*checked.unknown, *origin_warnings(config))]
    reasons = (
        not_exportable(config),
        only_merged(config),
        memory_warning(config, ranks=ranks) if check_memory else None,
    )
    lines += [f"warning    {reason}" for reason in reasons if reason is not None]
    return "\n".join(lines)


def _origin_lines(config: "RunConfig") -> list[str]:
    if config.init_from is None:
        return []
    bounds = [f"{name} +{allowed_frac * 100:.3g} %" for name, allowed_frac in config.data.retain.items()]
    lines = [f"from       {config.init_from}{', retains ' + ', '.join(bounds) if bounds else ''}"]
    if _has_checkpoint(config):
        return lines
    from smalti.train.origin import context_line, vocabulary_line

    changes = {"context": context_line(config), "vocabulary": vocabulary_line(config)}
    return lines + [f"{name:<10} {line}" for name, line in changes.items() if line is not None]


def _order_lines(config: "RunConfig", checked: "Inputs") -> list[str]:
    """Return the settings that differ from the default and change the order in which tokens are read."""
    data = config.data
    lines = []
    if len(data.stages) > 1 or data.stages[0].seq_len is not None:
        begins = [0, *(config.length.step_at(stage.until) for stage in data.stages[:-1])]
        lines += [
            f"stage {n:<5}from step {begin:,}, seq_len {seq_len:,}"
            for n, (begin, seq_len) in enumerate(zip(begins, data.seq_lens, strict=True))
        ]
    if data.packing != "concat":
        lines.append(f"packing    {data.packing}")
    if data.shuffle.mode != "full":
        shuffle = data.shuffle
        lines.append(
            f"shuffle    {shuffle.mode}: {shuffle.window_chunks} chunks of {format_count(shuffle.chunk_tokens)} tokens"
        )
    if data.skip:
        spans = [f"[{begin:,}, {end:,})" for begin, end in data.skip]
        each = ", each in the positions that remain after those before it" if len(spans) > 1 else ""
        lines.append(f"skip       positions {', then '.join(spans)}{each}")
    if data.takedowns is not None:
        from smalti.data.stream.takedowns import Takedowns

        count = sum(len(spans) for spans in Takedowns.read(data.takedowns, checked.sources).spans.values())
        empty = "" if count else ": the list is empty, so it has no effect"
        lines.append(f"takedowns  {count:,} {'document' if count == 1 else 'documents'} of {data.takedowns}{empty}")
    if data.fetch.cache is not None:
        lines.append(f"cache      {data.fetch.cache}, at most {format_bytes(data.fetch.cache_bytes)}")
    return lines


def _fork_lines(fork: "Fork | None") -> list[str]:
    if fork is None:
        return []
    done = f"{fork.at_step:,} steps = {format_count(fork.after.length.tokens(fork.at_step))} tokens are unchanged"
    return [f"fork       {done}; changes after them:", *(f"           {line}" for line in fork.lines())]


def _existing(config: "RunConfig") -> str:
    from smalti.track.run import RunFolder

    folder = RunFolder(config.run_folder)
    if not (folder.path / "config.yaml").exists():
        return ""
    step = folder.saved_step()
    return f"  (exists: would resume from step {step})" if step is not None else "  (exists: would start at step 0)"
