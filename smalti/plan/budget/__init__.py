"""Budgets: from some of money, compute, parameters and tokens, the others."""
