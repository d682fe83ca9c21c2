"""The output of ``smalti runs show``: the facts of one run as JSON values, and as text."""

from pathlib import Path
from typing import Any

from smalti.base.errors import UserError
from smalti.base.units import format_bytes, format_count, format_frac, format_seconds
from smalti.cli.plan.devices import device_of_run
from smalti.cli.runs.checkpoint_table import checkpoint_table
from smalti.cli.runs.goodput import goodput_facts, goodput_text
from smalti.cli.tables import pairs, table
from smalti.config.run import RunConfig
from smalti.cost.params import count
from smalti.plan.verify import verify
from smalti.track.checkpoints.facts import checkpoints
from smalti.track.listing import best_eval
from smalti.track.report.continued import COLUMNS, continued
from smalti.track.report.read import RunRecord, get, read_run
from smalti.track.report.words import event_words, score_words, whole_steps
from smalti.track.report.worse import worse_in_stages
from smalti.track.run import RunFolder
from smalti.track.stragglers import notes as stragglers

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


def about(folder: Path, *, n_events: int, usd_per_hour: float | None = None) -> dict[str, Any]:
    """Return the facts of a run as JSON values. Raises DataError if ``folder`` has no run.

    usd_per_hour: price of a rank's device; None: the usual one, if the device is known and has one.
    """
    run = read_run(folder)
    best = best_eval(folder / "metrics.jsonl")
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
        "goodput": _goodput(run, usd_per_hour),
        "metrics": {name: value for name, value in values.items() if value is not None},
        "best_eval": {"value": best.value, "step": best.step, "metric": best.metric} if best else None,
        "continued": _continued(run),
        "evals": {each.suite: {"time": each.time, "tasks": each.tasks} for each in run.evals},
        "events": list(run.events[-n_events:]) if n_events else [],
        "bytes": sizes_bytes(folder),
        "checkpoints": [each.to_json() for each in checkpoints(folder, run.events)],
        "plan": plan,
        "notes": [*([note] if note else []), *(each.words() for each in worse_in_stages(run)), *stragglers(run.events)],
    }


def about_text(facts: dict[str, Any]) -> str:
    """Return the facts as text, in blocks; missing ones are left out."""
    blocks = [
        _head(facts),
        _attempts_text(facts["attempts"], state=facts["state"]),
        goodput_text(facts["goodput"]),
        _metrics_text(facts),
        _continued_text(facts["continued"]),
        *(_suite_text(suite, suite_facts) for suite, suite_facts in facts["evals"].items()),
        _plan_text(facts["plan"]),
        _events_text(facts["events"]),
        checkpoint_table(facts["checkpoints"], compact=True) if facts["checkpoints"] else "",
        _sizes_text(facts),
        *(f"note: {note}" for note in facts["notes"]),
    ]
    return "\n\n".join(filter(None, blocks))


def sizes_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes on disk by part of the run folder; ``files``: those directly in it. Links are not followed."""
    sizes = {part: _size_bytes(folder / part) for part in _PARTS if (folder / part).is_dir()}
    sizes["files"] = sum(path.lstat().st_size for path in folder.iterdir() if not path.is_dir())
    return sizes


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
    """Return (config, None), or (None, why it is not a config of this version of ``smalti train``)."""
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


def _goodput(run: RunRecord, usd_per_hour: float | None) -> dict[str, Any] | None:
    source = "as given" if usd_per_hour is not None else None
    device = device_of_run(run)
    if usd_per_hour is None and device is not None and device.price is not None:
        usd_per_hour, source = device.price.usd_per_hour, f"{device.title}, on demand in {device.price.date}"
    return goodput_facts(run, usd_per_hour=usd_per_hour, price_source=source)


def _plan(run: RunRecord) -> tuple[list[dict[str, Any]], str | None]:
    """Return (comparisons of predicted and measured, None), or ([], why there are none)."""
    config, why = _config(run)
    speeds = [value for value in run.series("throughput/tokens_per_sec")[1] if value == value]
    if config is None or not speeds:
        return [], why
    comparisons = verify(
        config,
        machine=device_of_run(run),
        peak_flops_per_s=run.of_events("peak_flops_per_s"),
        tokens_per_s=speeds,
        tokens_learned=run.last("time/token"),
        checkpoint_bytes=run.last("ckpt/bytes"),
        checkpoint_blocked_s=run.last("ckpt/block_s"),
        checkpoint_staging_bytes=run.last("ckpt/staging_bytes"),
    )
    return [comparison.to_json() for comparison in comparisons if comparison.ratio is not None], None


def _attempts(run: RunRecord) -> list[dict[str, Any]]:
    """Return each attempt with its first step and its end, from the events."""
    by_number: dict[int, dict[str, Any]] = {}
    for event in run.events:
        number = event.get("attempt")
        if not isinstance(number, int):
            continue
        attempt = by_number.setdefault(number, {"attempt": number, "started": event.get("time"), "from_step": 0})
        kind = event.get("event")
        if kind == "attempt_started":
            attempt["ranks"] = event.get("ranks")
        elif kind == "resumed":
            attempt["from_step"], attempt["source"] = event.get("step"), event.get("source")
        elif kind == "rank_died":
            attempt["died"] = event_words(event)
        elif kind == "attempt_ended":
            attempt |= {"code": event.get("code"), "ended": event.get("reason"), "step": event.get("step")}
            attempt["seconds"] = event.get("seconds")
        elif kind == "run_finished":
            attempt.setdefault("ended", "finished")
            attempt["step"] = event.get("step")
    return [by_number[number] for number in sorted(by_number)]


def _head(facts: dict[str, Any]) -> str:
    made, config, params = facts["made_by"], facts["config"], facts["parameters"]
    commit = f", commit {made['commit'][:10]}{' with changes' if made['changed'] else ''}" if made["commit"] else ""
    state = facts["state"] + (f" ({facts['reason']})" if facts["reason"] else "")
    step = "-" if facts["step"] is None else str(facts["step"])
    lines = [
        ("run", facts["name"]),
        ("folder", facts["folder"]),
        ("state", state),
        ("step", f"{step} of {facts['steps_total']}" if facts["steps_total"] is not None else step),
        ("heartbeat", facts["heartbeat"] or "-"),
        ("made by", f"smalti {made['smalti']}{commit}" if made["smalti"] else "-"),
        ("command", " ".join(made["command"]) if isinstance(made["command"], list) else "-"),
    ]
    if params:
        lines.append(("parameters", f"{format_count(params['total'])}, {format_count(params['active'])} active"))
    lines += [(key, str(value)) for key, value in config.items()]
    return pairs(lines)


def _attempts_text(attempts: list[dict[str, Any]], *, state: str) -> str:
    rows = [
        (
            str(attempt["attempt"]),
            str(attempt.get("started") or "-")[:19].replace("T", " "),
            str(attempt.get("ranks", "-")),
            f"{attempt['from_step']} ({attempt['source']})" if attempt.get("source") else str(attempt["from_step"]),
            str(attempt.get("step", "-")),
            format_seconds(attempt["seconds"]) if attempt.get("seconds") is not None else "-",
            str(attempt.get("code", "-")),
            attempt.get("ended")
            or attempt.get("died")
            or (
                "still running, or killed with its machine"
                if attempt is attempts[-1] and state != "killed"
                else "killed: no end was recorded"
            ),
        )
        for attempt in attempts
    ]
    head = ("attempt", "started (UTC)", "ranks", "from step", "to step", "took", "code", "ended")
    return table(head, rows) if rows else ""


def _metrics_text(facts: dict[str, Any]) -> str:
    lines = [(name, with_unit(name, value)) for name, value in facts["metrics"].items()]
    if best := facts["best_eval"]:
        unit = "bits per byte" if best["metric"] == "bits_per_byte" else "nats per token"
        lines.append(("best held-out", f"{best['value']:.4f} {unit} at step {best['step']}, mean over sources"))
    return pairs(lines) if lines else ""


def _continued(run: RunRecord) -> dict[str, Any] | None:
    result = continued(run)
    return result.to_json() if result else None


def _continued_text(result: dict[str, Any] | None) -> str:
    return f"{result['title']}\n{table(COLUMNS, [heldout['words'] for heldout in result['sets']])}" if result else ""


def _suite_text(suite: str, results: dict[str, Any]) -> str:
    rows = [(name, *score_words(score)) for name, score in results["tasks"].items()]
    if not rows:
        return ""
    head = ("task", "measure", "value", "95 % interval", "n", "baseline")
    return f"suite {suite}, {results['time']}\n" + table(head, rows)


def _plan_text(plan: list[dict[str, Any]]) -> str:
    rows = [
        (
            comparison["name"],
            f"{comparison['predicted']:.4g}",
            f"{comparison['measured']:.4g}",
            f"{comparison['ratio']:.2f}",
        )
        for comparison in plan
        if comparison["name"] in ("step_s", "tokens_per_s", "mfu_frac")
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


def _sizes_text(facts: dict[str, Any]) -> str:
    sizes = {name: n_bytes for name, n_bytes in facts["bytes"].items() if n_bytes}
    parts = ", ".join(f"{name} {format_bytes(n_bytes)}" for name, n_bytes in sizes.items())
    return f"on disk: {format_bytes(sum(sizes.values()))} ({parts})" if sizes else ""


def with_unit(name: str, value: float) -> str:
    """Return the value of a metric with its unit, as text."""
    if name == "time/train":  # in hours
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
