"""Metric names, run folder, events, sinks, report."""
