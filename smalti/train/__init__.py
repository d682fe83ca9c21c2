"""One optimizer step, the loop around it, and how it survives."""
