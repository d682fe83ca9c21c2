"""Smalti: build custom language models of the DBRX class, from raw documents to a served, evaluated model.

Importing this package does no work and imports nothing heavy. The rooms are its sub-packages; see CONTRIBUTING.md for
a tour. The public Python surface for training is ``smalti.train`` (``load``, ``build``, ``fit``).
"""

__version__ = "0.1.0"
