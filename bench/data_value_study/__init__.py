"""Parts of the benchmark of what deduplication and a quality classifier are worth."""
