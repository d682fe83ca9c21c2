"""Comparison of runs: their differences, and their curves on one page."""
