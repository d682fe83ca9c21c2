"""Plain torch modules, dense and MoE, without a mesh."""
