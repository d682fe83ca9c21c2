"""Where metrics go; a sink answers to ``update(step, metrics)``. The run folder's JSONL is the truth."""
