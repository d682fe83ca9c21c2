"""Scores of answers and their intervals."""
