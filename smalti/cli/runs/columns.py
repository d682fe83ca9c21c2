"""The columns of ``smalti runs ls``: named ones, any metric (``loss/train/total``), any config key (``train.seed``).

Showing, sorting and filtering use the same columns: each gives a plain value and its text.
"""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from smalti.base.clock import age_s
from smalti.base.errors import UserError, nearest
from smalti.base.units import format_count, format_frac, format_seconds
from smalti.config.durations import to_seconds
from smalti.config.yaml_lines import inline
from smalti.track.listing import RunSummary
from smalti.track.report.read import get

SILENT_S = 600.0
"""A running run without a heartbeat for this long is shown as silent; the heartbeat is every 5 s."""

DEFAULT = ("run", "state", "step", "loss", "eval", "tokens", "speed", "mfu", "time", "heartbeat")
_CONDITION = re.compile(r"(?P<column>[^=!<>]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)")


@dataclass(frozen=True)
class Column:
    """A column: its heading, the plain value of a run (None where it has none), and its text."""

    head: str
    value: Callable[[RunSummary], Any]
    text: Callable[[RunSummary], str]


def columns(names: Sequence[str]) -> list[Column]:
    """Return the columns of these names; raises UserError for a name that ``column`` does not know."""
    return [column(name) for name in names]


def column(name: str) -> Column:
    """Return a column of the table, else of a metric (name with ``/``) or of a config key (with ``.``, or ``seed``)."""
    if name in COLUMNS:
        return COLUMNS[name]
    if "/" in name:
        return Column(name, lambda run: run.metrics.get(name), lambda run: _number(run.metrics.get(name)))
    if "." in name or name in ("seed", "name", "init_from"):
        return Column(name, lambda run: get(run.config, name), lambda run: _config_text(get(run.config, name)))
    close = nearest(name, COLUMNS)
    raise UserError(
        f"'{name}' is not a column",
        allowed=f"{', '.join(COLUMNS)}; a metric, such as loss/train/total; a config key, such as train.optimizer.lr",
        hint=f"did you mean '{close}'?" if close else None,
    )


def conditions(texts: Sequence[str]) -> Callable[[RunSummary], bool]:
    """Return a test whether a run meets all conditions (``loss<2``, ``run=lr-*``); one without a value does not."""
    tests = [_condition(text) for text in texts]
    return lambda run: all(test(run) for test in tests)


def metrics(names: Sequence[str], where: Sequence[str]) -> list[str]:
    """Return the metrics among columns and conditions, for ``list_runs`` to read."""
    requested = [*names, *(match["column"].strip() for match in map(_CONDITION.fullmatch, where) if match)]
    return [name for name in requested if "/" in name and name not in COLUMNS]


def _condition(text: str) -> Callable[[RunSummary], bool]:
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise UserError(
            f"--where '{text}' is not a condition",
            allowed="COLUMN=VALUE with one of = != < > <= >=; * in a text matches anything",
            hint="--where state=done --where 'loss<2.5'",
        )
    of, sign, wanted = column(match["column"].strip()), match["sign"], match["value"].strip()
    limit = _limit(wanted)
    if limit is None and sign not in ("=", "!="):
        raise UserError(
            f"--where '{text}': '{wanted}' is not a number, and {sign} compares numbers",
            allowed="a number, a percentage such as 30%, or a time such as 90s, 5min or 2h",
        )

    def holds(run: RunSummary) -> bool:
        value = of.value(run)
        if value is None:
            return False
        number = _as_number(value)
        if limit is not None and number is not None:
            return {"=": number == limit, "!=": number != limit, "<": number < limit, ">": number > limit,
                    "<=": number <= limit, ">=": number >= limit}[sign]  # fmt: skip
        same = fnmatch.fnmatchcase(value if isinstance(value, str) else inline(value), wanted)
        return same == (sign == "=") and sign in ("=", "!=")

    return holds


def ordered(runs: Sequence[RunSummary], name: str, *, reverse: bool) -> list[RunSummary]:
    """Return the runs sorted by a column; numbers before texts, and runs without a value last in either order."""
    of = column(name)

    def key(run: RunSummary) -> tuple[bool, float, str]:
        value = of.value(run)
        number = _as_number(value)
        return (number is None, number if number is not None else 0.0, str(value))

    known = [run for run in runs if of.value(run) is not None]
    return sorted(known, key=key, reverse=reverse) + [run for run in runs if of.value(run) is None]


def state_text(run: RunSummary) -> str:
    """Return the state, with ``silent`` for a run that should be alive and has no recent heartbeat."""
    age = age_s(run.heartbeat)
    if run.state in ("starting", "running") and age is not None and age > SILENT_S:
        return f"{run.state}, silent"
    return run.state


def _step_text(run: RunSummary) -> str:
    if run.step is None:
        return "-" if run.steps_total is None else f"-/{run.steps_total}"
    return f"{run.step}/{run.steps_total}" if run.steps_total is not None else str(run.step)


def _eval_text(run: RunSummary) -> str:
    best = run.best_eval
    if best is None:
        return "-"
    unit = "bits/byte" if best.metric == "bits_per_byte" else "nats/token"
    return f"{best.value:.3f} {unit} @{best.step}"


def _age_text(run: RunSummary) -> str:
    age = age_s(run.heartbeat)
    if age is None:
        return "-"
    return f"{round(max(age, 0))}s ago" if age < 60 else f"{format_seconds(age)} ago"


def _written(write: Callable[[Any], str], value: Callable[[RunSummary], Any]) -> Callable[[RunSummary], str]:
    return lambda run: "-" if value(run) is None else write(value(run))


def _plain(head: str, value: Callable[[RunSummary], Any], write: Callable[[Any], str] = str) -> Column:
    return Column(head, value, _written(write, value))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _config_text(value: Any) -> str:
    return "-" if value is None else value if isinstance(value, str) else inline(value)


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _limit(text: str) -> float | None:
    """Parse a number in the units of metrics: ``30%`` is 0.3, ``1h`` is 3600."""
    if text.endswith("%"):
        percent = _as_number(text[:-1])
        return None if percent is None else percent / 100
    number = _as_number(text)
    if number is not None:
        return number
    try:
        return to_seconds(text)
    except ValueError:
        return None


COLUMNS: dict[str, Column] = {
    "run": _plain("run", lambda run: run.name),
    "state": Column("state", lambda run: run.state, state_text),
    "step": Column("step", lambda run: run.step, _step_text),
    "loss": _plain("loss", lambda run: run.loss, lambda value: f"{value:.4f}"),
    "eval": Column("best eval", lambda run: run.best_eval.value if run.best_eval else None, _eval_text),
    "tokens": _plain("tokens", lambda run: run.tokens, format_count),
    "speed": _plain("tokens/s", lambda run: run.tokens_per_s, format_count),
    "mfu": _plain("MFU", lambda run: run.mfu_frac, format_frac),
    "time": _plain("time", lambda run: run.train_s, format_seconds),
    "attempt": _plain("attempt", lambda run: run.attempt),
    "heartbeat": Column("heartbeat", lambda run: run.heartbeat, _age_text),
    "reason": _plain("reason", lambda run: run.problem or run.reason),
    "folder": _plain("folder", lambda run: run.folder),
}
"""Name -> column, in the order that messages list them."""
