"""The Gauntlet: the 39 benchmarks of LLM Foundry in six categories."""
