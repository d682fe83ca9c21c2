"""A standard library of thirty short modules in place of the installed one, for the demo's corpus."""

from pathlib import Path
from types import SimpleNamespace

import pytest


def small_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it into ``folder``; ``smalti data documents`` reads it from then on."""
    folder.mkdir()
    for i in range(30):
        (folder / f"module_{i:02d}.py").write_text(
            f'"""Module number {i}: it adds what it is given to the value of the field and returns the sum."""\n\n'
            f"import os\n\n\ndef add_{i}(left, right):\n    total = left + right + {i}\n    return total\n"
        )
    paths = SimpleNamespace(get_paths=lambda: {"stdlib": str(folder)})
    monkeypatch.setattr("smalti.data.curate.installed_python.sysconfig", paths)
