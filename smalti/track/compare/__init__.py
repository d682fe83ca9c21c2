"""Several runs at once: what sets them apart, and their curves on one page."""
