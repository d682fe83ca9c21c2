"""Readers of the formats of other systems: each returns a ``Source``, its tokens as one long array.

No file is executed (pickles are refused), no name leads out of its folder, and a damaged index or shard is a DataError
that names it. How far the content itself is checked depends on the format: ``Source.checked`` says it.
"""
