"""Money, compute, parameters and tokens: from whatever is given, the rest."""
