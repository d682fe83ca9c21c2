"""Near-duplicate removal: MinHash proposes pairs, an exact count decides; a dropped document is near to a kept one."""
