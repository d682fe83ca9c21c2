"""IFEval: grades responses against the 25 verifiable instructions of Zhou et al. 2023 (arXiv 2311.07911)."""
