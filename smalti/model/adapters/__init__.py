"""Low-rank adapters of a decoder: LoRA beside frozen weights."""
