"""One generation engine: sequences in, tokens and text out, with a key/value cache."""
