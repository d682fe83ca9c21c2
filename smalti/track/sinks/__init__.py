"""Where metrics go: the run folder's JSONL, which is the truth; a terminal; trackers, which are fed from the JSONL."""
