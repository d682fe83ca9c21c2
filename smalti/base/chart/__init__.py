"""Draws charts as SVG text, without dependencies or scripts; draws all plots of Smalti.

Equal input gives equal text. Labels are escaped. A page includes ``CSS`` once (``standalone`` includes it in a single
chart).
"""

from smalti.base.chart.bars import Bar, bar_chart
from smalti.base.chart.frame import CSS, column, standalone
from smalti.base.chart.heatmap import heatmap
from smalti.base.chart.lines import Cross, Marker, Series, line_chart, stacked_area
from smalti.base.chart.timeline import Arrow, Panel, timeline

__all__ = [
    "CSS",
    "Arrow",
    "Bar",
    "Cross",
    "Marker",
    "Panel",
    "Series",
    "bar_chart",
    "column",
    "heatmap",
    "line_chart",
    "stacked_area",
    "standalone",
    "timeline",
]
