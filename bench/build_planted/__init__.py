"""The parts of ``bench/build_corpus.py``: real documents, what is planted in them, and independent checks."""
