"""The state that a forked schedule copies from its parent: spans, tables and skips before the fork."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from smalti.data.order.lookup import ShareBase
from smalti.data.order.skip import Gaps
from smalti.data.order.spans import Span
from smalti.data.order.tables import Table, reorder_columns

if TYPE_CHECKING:
    from smalti.data.order.schedule import Schedule


@dataclass(frozen=True)
class ParentState:
    """The steps of ``schedule`` before the fork, with columns in the order of the new schedule's sources."""

    schedule: "Schedule"
    spans: list[Span]
    tables: list[Table]
    share_bases: list[ShareBase]
    gaps: dict[tuple[int, int], Gaps]
    """(segment, source) -> ordinals that the steps before the fork skip."""


def copy_parent_state(schedule: "Schedule", step: int, sources: Sequence[str]) -> ParentState:
    """Copy what ``schedule`` has before ``step``, for a fork there. ``sources``: the new schedule's, in its order."""
    before = schedule.sources
    lookup = schedule.lookup
    return ParentState(
        schedule,
        [span.for_sources(before, sources) for span in schedule.spans if span.start_step < step],
        [
            replace(
                table,
                n_steps=min(table.n_steps, step - table.start_step),
                base=reorder_columns(table.base, before, sources),
                counts=reorder_columns(table.counts, before, sources),
                sums=reorder_columns(table.sums, before, sources),
            )
            for table in lookup.tables
            if table.start_step < step
        ],
        [
            ShareBase(base.start_step, reorder_columns(base.counts, before, sources))
            for base in lookup.share_bases
            if base.start_step < step
        ],
        {
            (segment, sources.index(before[source])): Gaps(gaps.passed(int(schedule.counts(step, segment)[source])))
            for (segment, source), gaps in schedule.gaps.items()
            if schedule.segments[segment].start_step < step
        },
    )
