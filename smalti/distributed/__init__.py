"""Parallelism applied to a plain model from outside; sharded save and load; export."""
