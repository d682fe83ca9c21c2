"""Raw documents -> deterministic token stream; knows no model and no torch."""
