"""The model registry: versions of models with their facts, tags that move between them, references ``models:/...``.

It is a catalog in the database of ``SMALTI_HOME`` (``base.database``); the models stay where they are.
"""
