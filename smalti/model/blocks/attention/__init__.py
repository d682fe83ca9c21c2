"""Causal self-attention: one module, and the kernels that it may run on."""
