"""Parallelism laid on a plain model from outside; sharded save and load; export."""
