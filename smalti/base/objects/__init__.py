"""Folders of objects that are written once, in a store or on a disk: listed, put, got and deleted at one rate.

    objects.open_folder("s3://bucket/run")   ->  names, sizes, get, put, put_new, delete

Guarantees: an object is written whole or not at all; ``put_new`` replaces nothing where the store has conditional
writes; a listing that fails raises and is never empty; nothing is renamed.
"""

from smalti.base.objects.folder import Folder, open_folder
from smalti.base.objects.ordered import ordered
from smalti.base.objects.requests import Requests, Stopped

__all__ = ["Folder", "Requests", "Stopped", "open_folder", "ordered"]
