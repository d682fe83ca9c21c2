"""Tasks of an installed lm-evaluation-harness, run on the engine; it is imported only when they are run."""
