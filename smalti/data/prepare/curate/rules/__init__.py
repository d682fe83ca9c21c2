"""Quality rules: each gives a score and has limits; named presets hold them with the thresholds of their source."""
