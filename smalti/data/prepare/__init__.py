"""Raw documents -> clean, unique documents -> token files."""
