"""Finds given n-grams of words in the token files of a run. Only ``ngrams`` and ``scan`` use Daft."""
