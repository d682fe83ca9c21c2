"""Quality rules: each gives a score, each has limits, and named presets hold them with the thresholds of their source."""
