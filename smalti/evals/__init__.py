"""Measures a model; never trains one."""
