"""Scaling laws: loss by parameters and tokens, and the optimum for a budget."""
