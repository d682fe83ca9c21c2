"""Parallelism applied to a plain model: FSDP, tensor, expert, sequence, pipeline."""
