"""The parts of a block: attention, rotary embedding, norm, MLP, mixture of experts, embedding."""
