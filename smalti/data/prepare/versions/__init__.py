"""Versions of a set, made ready for trainings that are compared."""
