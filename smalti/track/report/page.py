"""Builds the report's page from a ``RunRecord``, section by section. All text is escaped here."""

import json
from collections.abc import Mapping
from datetime import datetime
from html import escape
from typing import Any

from smalti.base.units import format_count, format_flops, format_frac, format_seconds
from smalti.track.report import curves
from smalti.track.report.continued import COLUMNS, continued
from smalti.track.report.experts import experts_section
from smalti.track.report.goodput import goodput_section
from smalti.track.report.html import document, row, table, wide_and_narrow
from smalti.track.report.machine import machine_charts
from smalti.track.report.read import EvalRun, RunRecord
from smalti.track.report.tasks import tasks_section
from smalti.track.report.words import event_words, is_number, parse_time, score_words, whole_steps
from smalti.track.report.worse import worse_in_stages

_EVENTS = 200
_NARROW = 360
_TASK_COLUMNS = (
    ("task", "k"), ("metric", ""), ("value", "n v"), ("95 % interval", "n"), ("n", "n"), ("baselines", "")
)  # fmt: skip
_EVENT_COLUMNS = (("time (UTC)", "k"), ("since start", "n"), ("attempt", "n"), ("event", "k v"), ("details", "soft"))
"""Name and CSS class of each column."""


def page(run: RunRecord, parameters: tuple[int, int] | None) -> str:
    """Return the whole page."""
    sections = (
        _header(run, parameters),
        _training(run),
        experts_section(run),
        _continued(run),
        tasks_section(run),
        _evals(run),
        _samples(run),
        _machine(run),
        goodput_section(run),
        _timeline(run),
        _config(run),
        f"<footer>Written by <code>smalti runs report {escape(run.folder)}</code> from the run folder.</footer>",
    )
    return document(f"{run.name} - Smalti run", sections)


def _header(run: RunRecord, parameters: tuple[int, int] | None) -> str:
    kind = {"done": "good", "failed": "bad", "killed": "bad"}.get(run.state, "")
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{f' <small>{escape(more)}</small>' if more else ''}</dd></div>"
        for name, value, more in _facts(run, parameters)
    )
    reason = run.status.get("reason")
    note = f'<p class="note">{escape(str(reason))}</p>' if reason else ""
    return (
        f'<header><h1>{escape(run.name)}</h1><span class="state {kind}">{escape(run.state)}</span>{note}'
        f'<dl class="facts">{facts}</dl></header>'
    )


def _facts(run: RunRecord, parameters: tuple[int, int] | None) -> list[tuple[str, str, str]]:
    facts: list[tuple[str, str, str]] = []
    if parameters is None and run.of_events("params_total") is not None:
        total = int(run.of_events("params_total"))
        parameters = (total, int(run.of_events("params_active") or total))
    if parameters is not None:
        active = f"{format_count(parameters[1])} active" if parameters[1] != parameters[0] else ""
        facts.append(("Parameters", format_count(parameters[0]), active))
    if run.rows:
        facts.append(("Steps", str(run.rows[-1]["step"]), f"of {whole_steps(run)}"))
    if (tokens := run.last("time/token")) is not None:
        facts.append(("Tokens", format_count(tokens), ""))
    if (hours := run.last("time/train")) is not None:
        facts.append(("Training time", format_seconds(hours * 3600), ""))
    if (loss := run.tail_mean("loss/train/total", frac=0.05)) is not None:
        facts.append(("Training loss", f"{loss:.3f}", "nats per token, mean of the last 5 % of steps"))
    if (rate := run.median("throughput/tokens_per_sec")) is not None:
        facts.append(("Speed", format_count(rate), "tokens/s, median"))
    if (mfu := run.median("throughput/device/mfu")) is not None:
        peak = run.of_events("peak_flops_per_s")
        facts.append(("MFU", format_frac(mfu), f"of {format_flops(peak)}/s" if is_number(peak) else "median"))
    if _attempts(run) > 1:
        facts.append(("Attempts", str(_attempts(run)), ""))
    return facts


def _attempts(run: RunRecord) -> int:
    return len({event["attempt"] for event in run.events if isinstance(event.get("attempt"), int)})


def _training(run: RunRecord) -> str:
    if not run.rows:
        return "<h2>Training</h2><p>No step has been logged yet.</p>"
    small = "".join(f"<figure>{chart}</figure>" for chart in curves.small_charts(run))
    loss = wide_and_narrow(
        curves.loss_chart(run, width=1040, height=360), curves.loss_chart(run, width=_NARROW, height=280)
    )
    warnings = "".join(f'<p class="note bad">{escape(worse.words())}</p>' for worse in worse_in_stages(run))
    return f'<h2>Training</h2>{warnings}<figure>{loss}</figure><div class="grid below">{small}</div>'


def _continued(run: RunRecord) -> str:
    comparison = continued(run)
    if comparison is None:
        return ""
    kinds = dict(zip(COLUMNS, ("k", "k v", "n", "n", "n v", "n", "k"), strict=True))
    columns = tuple(kinds.items())
    wide, narrow = (curves.continued_chart(run, comparison, width=width) for width in (1040, _NARROW))
    chart = f"<figure>{wide_and_narrow(wide, narrow)}</figure>" if wide and narrow else ""
    rows = "".join(row(columns, words) for words in comparison.table_rows())
    head = f'<h2>{comparison.heading}</h2><p class="note">{escape(comparison.title())}</p>'
    return head + chart + table(columns, rows)


def _machine(run: RunRecord) -> str:
    charts = "".join(f"<figure>{chart}</figure>" for chart in machine_charts(run))
    if not charts:
        return ""
    return f'<h2>Machine</h2><p class="note">The machine of rank 0.</p><div class="grid">{charts}</div>'


def _evals(run: RunRecord) -> str:
    if not run.evals:
        return "<h2>Evaluation</h2><p>Not evaluated yet: <code>smalti eval run " + escape(run.folder) + "</code></p>"
    return "<h2>Evaluation</h2>" + "".join(_suite(results, curves.source_colours(run)) for results in run.evals)


def _suite(run: EvalRun, colours: dict[str, int]) -> str:
    bars = curves.bits_bars(run.tasks, colours, width=1040)
    narrow = curves.bits_bars(run.tasks, colours, width=_NARROW)
    rows = "".join(_task(name, score) for name, score in {**run.tasks, **run.averages}.items())
    return (
        f'<p class="note">Suite <b>{escape(run.suite)}</b>, {escape(run.time)}, model '
        f"{escape(str(run.results.get('model', '?')))}</p>"
        + (f"<figure>{wide_and_narrow(bars, narrow)}</figure>" if bars and narrow else "")
        + table(_TASK_COLUMNS, rows)
    )


def _task(name: str, score: Mapping[str, Any]) -> str:
    return row(_TASK_COLUMNS, (name, *score_words(score)))


def _samples(run: RunRecord) -> str:
    generated = [_sample("Generated by the model", sample) for sample in run.samples]
    answers = [
        _sample(f"{results.suite} / {sample.get('task', '')}", sample)
        for results in run.evals
        for sample in results.samples
    ]
    if not generated and not answers:
        return ""
    questions = f"<details><summary>Answers to {len(answers)} questions</summary>{''.join(answers)}</details>"
    return "<h2>Samples</h2>" + "".join(generated) + (questions if answers else "")


def _sample(label: str, sample: Mapping[str, Any]) -> str:
    prompt = str(sample.get("prompt", "")) + ("\n" if sample.get("chat") else "")
    verdict = ""
    candidates = sample.get("choices", sample.get("candidates"))  # results of earlier versions have candidates
    if isinstance(candidates, list):
        choice = sample.get("choice")
        completion = str(candidates[choice]) if isinstance(choice, int) and 0 <= choice < len(candidates) else ""
        right = bool(sample.get("correct"))
        gold = sample.get("gold")
        wanted = (
            f", correct: {candidates[gold]!r}" if not right and isinstance(gold, int) and gold < len(candidates) else ""
        )
        verdict = (
            f' <span class="{"right" if right else "wrong"}">{"correct" if right else "wrong"}{escape(wanted)}</span>'
        )
    else:
        completion = str(sample.get("completion", sample.get("answer", sample.get("text", ""))))
    return (
        f'<div class="sample"><div class="soft">{escape(label)}{verdict}</div>'
        f'<pre><span class="given">{escape(prompt)}</span><b>{escape(completion)}</b></pre></div>'
    )


def _timeline(run: RunRecord) -> str:
    if not run.events:
        return ""
    left_out = len(run.events) - _EVENTS
    shown = run.events if left_out <= 0 else (*run.events[: _EVENTS // 2], *run.events[-_EVENTS // 2 :])
    first = parse_time(run.events[0].get("time"))
    rows = "".join(_event(event, first) for event in shown)
    note = (
        f'<p class="note">{left_out} events in the middle are omitted; events.jsonl has all.</p>'
        if left_out > 0
        else ""
    )
    return f"<h2>Timeline</h2>{note}" + table(_EVENT_COLUMNS, rows)


def _event(event: Mapping[str, Any], first: datetime | None) -> str:
    time = parse_time(event.get("time"))
    since = format_seconds((time - first).total_seconds()) if time and first else ""
    stamp = str(event.get("time", ""))[:19].replace("T", " ")
    cells = (stamp, since, str(event.get("attempt", "")), str(event.get("event", "?")), event_words(event))
    return row(_EVENT_COLUMNS, cells)


def _config(run: RunRecord) -> str:
    parts = []
    if run.config_text:
        parts.append(f"<details><summary>config.yaml</summary><pre>{escape(run.config_text)}</pre></details>")
    if run.provenance:
        text = json.dumps(run.provenance, indent=2, ensure_ascii=False)
        parts.append(f"<details><summary>provenance.json</summary><pre>{escape(text)}</pre></details>")
    return "<h2>Config and provenance</h2>" + "".join(parts) if parts else ""
