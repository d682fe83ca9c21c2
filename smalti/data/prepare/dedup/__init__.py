"""Near-duplicate removal: MinHash proposes, an exact count decides, what goes is near to what stays."""
