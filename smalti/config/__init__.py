"""The schema of everything that a user may write, one file an area, and its loader. Knows no torch."""
