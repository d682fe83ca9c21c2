"""Control plane: the agent that starts and watches a node's ranks, and probes. Holds no torch itself."""
