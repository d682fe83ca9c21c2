"""Readers of what other systems wrote: each form gives a ``Source``, its tokens as one long array.

Promises: nothing in a file is run (pickles are refused), no name leads out of its folder, and a damaged index or shard
is a DataError that names it. How far the content itself is checked is the form's affair: each source says it in
``checked``. ``smalti/data/sources/open.py`` chooses the reader.
"""
