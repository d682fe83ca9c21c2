"""A standard library of thirty short modules in place of the installed one, for the demo's corpus."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest


def synthetic_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write it into ``folder``; ``smalti data documents`` reads it from then on."""
    folder.mkdir()
    draw = random.Random(3)
    for i in range(30):
        # Words of their own, so that no two modules are near-duplicates.
        a, b, c, d, e, f = ("".join(draw.choices("aeioulnrst", k=draw.randint(4, 9))) for _ in range(6))
        (folder / f"module_{i:02d}.py").write_text(
            f'"""Module {i} adds the {a} that it is given to the {b} of the {c}, and returns the {d} with {e}."""\n\n'
            f"import os\n\n\ndef {f}_{a}({b}, {c}):\n    {d} = {b} + {c} + {i}\n    return {d} * {e}({f})\n"
        )
    paths = SimpleNamespace(get_paths=lambda: {"stdlib": str(folder)})
    monkeypatch.setattr("smalti.data.documents.installed_python.sysconfig", paths)
