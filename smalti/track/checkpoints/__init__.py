"""Checkpoints as files: names, manifests with digests, which to keep. No torch (see `distributed.checkpoint`)."""
