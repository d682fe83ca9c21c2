"""Maps positions to (source, slot) by tables of counts, and back: binary searches, for a run of any length.

A *slot* numbers the sequences that a segment takes from a source, from 0.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from smalti.data.order.interleave import SpanWeights, interleave
from smalti.data.order.spans import Timeline
from smalti.data.order.tables import Int16s, Int64s, Table


class ShareBase(NamedTuple):
    """The start of a sum of exact shares: the first step of a segment, or a fork inside one."""

    start_step: int
    counts: Int64s
    """[sources] slots of the segment before ``start_step``: 0 except at a fork."""


class Lookup:
    """The tables of a run, in the order of their steps."""

    def __init__(self, tables: Sequence[Table], share_bases: Sequence[ShareBase]) -> None:
        self.tables = tuple(tables)
        self.share_bases = tuple(share_bases)
        self._first_steps = [table.start_step for table in self.tables]
        self._first_positions = np.array([table.first_position for table in self.tables], dtype=np.int64)

    def counts(self, step: int) -> Int64s:
        """Return the slots [sources] before ``step`` in the segment of ``step - 1``."""
        table = self.tables[bisect_right(self._first_steps, step - 1) - 1]
        return table.before(step - table.start_step)

    def sources_of(self, step: int) -> Int16s:
        """Return the source of each position of a step [rows]."""
        table = self.tables[bisect_right(self._first_steps, step) - 1]
        return table.batch(step - table.start_step).source

    def share_base(self, step: int) -> ShareBase:
        """Return the start of the sum of the exact shares of ``step``."""
        return self.share_bases[bisect_right([base.start_step for base in self.share_bases], step) - 1]

    def locate(self, positions: Int64s) -> tuple[Int16s, Int64s, Int16s]:
        """Return source [n], slot [n] and segment [n] of positions [n]."""
        source = np.empty(positions.shape, dtype=np.int16)
        slot = np.empty(positions.shape, dtype=np.int64)
        segment = np.empty(positions.shape, dtype=np.int16)
        table_of = np.searchsorted(self._first_positions, positions, side="right") - 1
        for index in sorted(set(table_of.ravel().tolist())):
            table = self.tables[index]
            mask = table_of == index
            source[mask], slot[mask] = table.locate(positions[mask] - table.first_position)
            segment[mask] = table.segment
        return source, slot, segment

    def position_of(self, source: int, segment: int, slots: Int64s) -> Int64s:
        """Return the positions of slots [n] of one source in one segment; the slots must exist."""
        tables = [table for table in self.tables if table.segment == segment]
        bases = np.array([table.base[source] for table in tables])
        table_of = np.searchsorted(bases, slots, side="right") - 1
        positions = np.empty(slots.shape, dtype=np.int64)
        for index in sorted(set(table_of.ravel().tolist())):
            mask = table_of == index
            positions[mask] = tables[index].first_position + tables[index].position_of(source, slots[mask])
        return positions


def build_lookup(
    timeline: Timeline, unit: int, n_sources: int, from_step: int, tables: Sequence[Table], bases: Sequence[ShareBase]
) -> Lookup:
    """Build the tables of all spans from ``from_step`` on; ``tables`` and ``bases`` are those of the earlier steps."""
    all_tables = list(tables)
    all_bases = list(bases)
    segment_starts = {segment.start_step for segment in timeline.segments}
    chosen = [index for index, span in enumerate(timeline.spans) if span.start_step >= from_step]
    begin = 0
    for end in range(1, len(chosen) + 1):
        if end < len(chosen) and timeline.spans[chosen[end]].start_step not in segment_starts:
            continue
        group = chosen[begin:end]
        start_step = timeline.spans[group[0]].start_step
        continues = all_tables and start_step not in segment_starts
        base = all_tables[-1].end if continues else np.zeros(n_sources, np.int64)
        all_bases.append(ShareBase(start_step, base))
        weights = [
            SpanWeights(timeline.end_step(index) - span.start_step, span.rows, span.weights)
            for index, span in ((index, timeline.spans[index]) for index in group)
        ]
        for cycle in interleave(weights, unit):
            step = start_step + cycle.start_step
            table = Table.of(
                cycle,
                start_step=step,
                first_position=timeline.first_position(step),
                rows=timeline.span(step).rows,
                segment=timeline.segment(step),
                base=base,
            )
            all_tables.append(table)
            base = table.end
        begin = end
    return Lookup(all_tables, all_bases)
