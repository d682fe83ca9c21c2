"""Stand-in: see pyproject.toml above."""
