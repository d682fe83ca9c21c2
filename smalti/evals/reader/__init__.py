"""Reads the samples of an evaluation: orders them, flags wrong items, shows each score before and after the flags."""
