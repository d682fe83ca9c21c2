"""What ``smalti runs show`` says about one run: gathered as plain values, then written for people."""

from pathlib import Path
from typing import Any

from smalti.base.errors import UserError
from smalti.base.units import format_bytes, format_count, format_frac, format_seconds
from smalti.cli.plan.recipe import device_of
from smalti.cli.tables import pairs, table
from smalti.config.run import RunConfig
from smalti.cost.params import count
from smalti.plan.verify import verify
from smalti.track.checkpoints import complete
from smalti.track.listing import best_eval
from smalti.track.report.continued import HEAD, continued
from smalti.track.report.read import RunRecord, get, read_run
from smalti.track.report.words import event_words, score_words, whole_steps
from smalti.track.report.worse import worse_in_stages
from smalti.track.run import RunFolder

_SHOWN = ("loss/train/total", "time/token", "time/train", "throughput/tokens_per_sec", "throughput/device/mfu")
_PARTS = ("checkpoints", "export", "logs", "evals", "tokenizer", "profile")
_CONFIG = (
    "model.family",
    "model.hidden_size",
    "model.num_hidden_layers",
    "train.duration",
    "train.global_batch_tokens",
    "data.seq_len",
    "train.optimizer.lr",
    "train.precision.compute",
    "train.parallel.ranks",
    "seed",
)


def about(folder: Path, *, n_events: int) -> dict[str, Any]:
    """Everything that the page shows, as JSON values. DataError if ``folder`` holds no run."""
    run = read_run(folder)
    found = best_eval(folder / "metrics.jsonl")
    values = {name: run.last(name) for name in (*_SHOWN, *_held_out(run))}
    plan, note = _plan(run)
    return {
        "name": run.name,
        "folder": run.folder,
        "state": run.state,
        "reason": run.status.get("reason"),
        "step": run.rows[-1]["step"] if run.rows else run.status.get("step"),
        "steps_total": int(steps) if (steps := whole_steps(run)).isdigit() else None,
        "attempt": run.status.get("attempt"),
        "heartbeat": run.status.get("heartbeat"),
        "made_by": _made_by(run),
        "config": {key: value for key in _CONFIG if (value := get(run.config, key)) is not None},
        "parameters": _parameters(run),
        "attempts": _attempts(run),
        "metrics": {name: value for name, value in values.items() if value is not None},
        "best_eval": {"value": found.value, "step": found.step, "metric": found.metric} if found else None,
        "continued": _continued(run),
        "evals": {one.suite: {"time": one.time, "tasks": one.tasks} for one in run.evals},
        "events": list(run.events[-n_events:]) if n_events else [],
        "bytes": sizes_bytes(folder),
        "checkpoints": sorted(complete(folder / "checkpoints")),
        "plan": plan,
        "notes": [*([note] if note else []), *(one.words() for one in worse_in_stages(run))],
    }


def about_text(found: dict[str, Any]) -> str:
    """The same for people, in blocks; what the folder does not have is left out."""
    blocks = [
        _head(found),
        _attempts_text(found["attempts"]),
        _metrics_text(found),
        _continued_text(found["continued"]),
        *(_suite_text(suite, one) for suite, one in found["evals"].items()),
        _plan_text(found["plan"]),
        _events_text(found["events"]),
        _sizes_text(found),
        *(f"note: {note}" for note in found["notes"]),
    ]
    return "\n\n".join(filter(None, blocks))


def sizes_bytes(folder: Path) -> dict[str, int]:
    """Bytes on disk by part of the run folder; ``files`` are those that lie in it directly. Links are not followed."""
    found = {part: _size_bytes(folder / part) for part in _PARTS if (folder / part).is_dir()}
    found["files"] = sum(path.lstat().st_size for path in folder.iterdir() if not path.is_dir())
    return found


def _size_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or path.is_file())


def _held_out(run: RunRecord) -> list[str]:
    names = sorted(name for name in run.names if name.startswith("metrics/eval/"))
    bits = [name for name in names if name.endswith("/bits_per_byte")]
    return bits or [name for name in names if name.endswith("/LanguageCrossEntropy")]


def _made_by(run: RunRecord) -> dict[str, Any]:
    git = run.provenance.get("git")
    return {
        "time": run.provenance.get("time"),
        "smalti": run.provenance.get("smalti"),
        "commit": git.get("commit") if isinstance(git, dict) else None,
        "changed": git.get("dirty") if isinstance(git, dict) else None,
        "command": run.provenance.get("command"),
    }


def _config(run: RunRecord) -> tuple[RunConfig | None, str | None]:
    """The config, or why it is none (of another kind of training, of another version)."""
    try:
        return RunFolder.read(run.folder).config(RunConfig), None
    except UserError as error:
        return None, f"config.yaml is not one of this version's 'smalti train': {error.message}"


def _parameters(run: RunRecord) -> dict[str, int] | None:
    config, _ = _config(run)
    if config is None:
        return None
    params = count(config.model)
    return {"total": params.total, "active": params.active}


def _plan(run: RunRecord) -> tuple[list[dict[str, Any]], str | None]:
    """Predicted and measured, in short, and what stands in the way of it."""
    config, why = _config(run)
    speeds = [value for value in run.series("throughput/tokens_per_sec")[1] if value == value]
    if config is None or not speeds:
        return [], why
    found = verify(
        config,
        machine=device_of(run),
        peak_flops_per_s=run.of_events("peak_flops_per_s"),
        tokens_per_s=speeds,
        tokens_learned=run.last("time/token"),
    )
    return [one.to_json() for one in found if one.ratio is not None], None


def _attempts(run: RunRecord) -> list[dict[str, Any]]:
    """Each attempt with where it began and how it ended, as the events say."""
    by_number: dict[int, dict[str, Any]] = {}
    for event in run.events:
        number = event.get("attempt")
        if not isinstance(number, int):
            continue
        one = by_number.setdefault(number, {"attempt": number, "started": event.get("time"), "from_step": 0})
        kind = event.get("event")
        if kind == "attempt_started":
            one["ranks"] = event.get("ranks")
        elif kind == "resumed":
            one["from_step"] = event.get("step")
        elif kind == "rank_died":
            one["died"] = event_words(event)
        elif kind == "attempt_ended":
            one |= {"code": event.get("code"), "ended": event.get("reason"), "step": event.get("step")}
            one["seconds"] = event.get("seconds")
        elif kind == "run_finished":
            one.setdefault("ended", "finished")
            one["step"] = event.get("step")
    return [by_number[number] for number in sorted(by_number)]


def _head(found: dict[str, Any]) -> str:
    made, config, params = found["made_by"], found["config"], found["parameters"]
    commit = f", commit {made['commit'][:10]}{' with changes' if made['changed'] else ''}" if made["commit"] else ""
    state = found["state"] + (f" ({found['reason']})" if found["reason"] else "")
    step = "-" if found["step"] is None else str(found["step"])
    lines = [
        ("run", found["name"]),
        ("folder", found["folder"]),
        ("state", state),
        ("step", f"{step} of {found['steps_total']}" if found["steps_total"] is not None else step),
        ("heartbeat", found["heartbeat"] or "-"),
        ("made by", f"smalti {made['smalti']}{commit}" if made["smalti"] else "-"),
        ("command", " ".join(made["command"]) if isinstance(made["command"], list) else "-"),
    ]
    if params:
        lines.append(("parameters", f"{format_count(params['total'])}, {format_count(params['active'])} active"))
    lines += [(key, str(value)) for key, value in config.items()]
    return pairs(lines)


def _attempts_text(attempts: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(one["attempt"]),
            str(one.get("started") or "-")[:19].replace("T", " "),
            str(one.get("ranks", "-")),
            str(one["from_step"]),
            str(one.get("step", "-")),
            format_seconds(one["seconds"]) if one.get("seconds") is not None else "-",
            str(one.get("code", "-")),
            one.get("ended") or one.get("died") or "has not ended, or was killed with its machine",
        )
        for one in attempts
    ]
    head = ("attempt", "started (UTC)", "ranks", "from step", "to step", "took", "code", "ended")
    return table(head, rows) if rows else ""


def _metrics_text(found: dict[str, Any]) -> str:
    lines = [(name, with_unit(name, value)) for name, value in found["metrics"].items()]
    if best := found["best_eval"]:
        unit = "bits per byte" if best["metric"] == "bits_per_byte" else "nats per token"
        lines.append(("best held-out", f"{best['value']:.4f} {unit} at step {best['step']}, mean over sources"))
    return pairs(lines) if lines else ""


def _continued(run: RunRecord) -> dict[str, Any] | None:
    found = continued(run)
    return found.to_json() if found else None


def _continued_text(found: dict[str, Any] | None) -> str:
    return f"{found['title']}\n{table(HEAD, [one['words'] for one in found['sets']])}" if found else ""


def _suite_text(suite: str, found: dict[str, Any]) -> str:
    rows = [(name, *score_words(score)) for name, score in found["tasks"].items()]
    if not rows:
        return ""
    head = ("task", "measure", "value", "95 % interval", "n", "beside it")
    return f"suite {suite}, {found['time']}\n" + table(head, rows)


def _plan_text(plan: list[dict[str, Any]]) -> str:
    rows = [
        (one["name"], f"{one['predicted']:.4g}", f"{one['measured']:.4g}", f"{one['ratio']:.2f}")
        for one in plan
        if one["name"] in ("step_s", "tokens_per_s", "mfu_frac")
    ]
    return table(("plan", "predicted", "measured", "ratio"), rows) if rows else ""


def _events_text(events: list[dict[str, Any]]) -> str:
    rows = [
        (
            str(event.get("time", ""))[:19].replace("T", " "),
            str(event.get("attempt", "")),
            str(event.get("event", "?")),
            event_words(event)[:160],
        )
        for event in events
    ]
    return table(("last events (UTC)", "attempt", "event", ""), rows) if rows else ""


def _sizes_text(found: dict[str, Any]) -> str:
    sizes = {name: n_bytes for name, n_bytes in found["bytes"].items() if n_bytes}
    parts = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in sizes.items())
    kept = f"\ncheckpoints: {', '.join(found['checkpoints'])}" if found["checkpoints"] else ""
    return f"on disk: {format_bytes(sum(sizes.values()))} ({parts}){kept}" if sizes else ""


def with_unit(name: str, value: float) -> str:
    """The value of a metric as a person reads it; metrics.jsonl and --json have the plain number."""
    if name == "time/train":  # hours, as the table of names says
        return f"{format_seconds(value * 3600)} in training steps"
    if name == "time/token":
        return f"{format_count(value)} tokens"
    if name == "throughput/tokens_per_sec":
        return f"{format_count(value)} tokens/s"
    if name == "throughput/device/mfu":
        return format_frac(value)
    if name.endswith("/bits_per_byte"):
        return f"{value:.6g} bits per byte"
    if name.endswith(("/LanguageCrossEntropy", "loss/train/total")):
        return f"{value:.6g} nats per token"
    return f"{value:.6g}"
