"""Answers requests from an exported model."""
