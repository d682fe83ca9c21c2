"""Scaling laws: loss from parameters and tokens, and what is best for a budget."""
