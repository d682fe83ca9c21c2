"""Evaluation tasks: held-out text, and tasks generated from a seed."""
