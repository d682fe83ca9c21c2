"""Tuning on preferences: losses over packed rows of pairs, and the reference that they compare with."""
