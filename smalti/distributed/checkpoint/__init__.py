"""Sharded checkpoints and export."""
