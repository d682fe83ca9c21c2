"""The losses of tuning as functions of float tensors: no model, no reduction; each names its source."""
