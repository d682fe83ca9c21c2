"""Metric sinks: the run folder's JSONL file, the console, and trackers, which are fed from the JSONL file."""
