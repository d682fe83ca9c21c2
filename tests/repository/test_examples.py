"""The documentation's Python and YAML are run and loaded, so they cannot drift."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import yaml

from smalti.config.build import BuildConfig
from smalti.config.clusters import ClustersConfig
from smalti.config.curate import CurateConfig, TokenizeConfig
from smalti.config.dedup import DedupConfig
from smalti.config.fleet import FleetConfig
from smalti.config.load import from_dict
from smalti.config.run import RunConfig
from smalti.config.task import TaskConfig

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

WHOLE = (RunConfig, CurateConfig, TokenizeConfig, DedupConfig, TaskConfig, BuildConfig, ClustersConfig, FleetConfig)


def blocks(language: str) -> list[tuple[str, str]]:
    """(page and number, text) of every fenced block of a language."""
    found = []
    for page in PAGES:
        texts = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found += [(f"{page.relative_to(ROOT)}#{number}", text) for number, text in enumerate(texts)]
    return found


@pytest.mark.parametrize(("where", "text"), blocks("yaml"), ids=lambda value: value if "#" in value[:60] else "")
def test_yaml_is_a_config(where, text):
    value = yaml.safe_load(text)
    kind = next(
        (kind for kind in WHOLE if value.keys() <= kind.model_fields.keys() and needed(kind) <= value.keys()), None
    )
    if kind is not None:
        assert isinstance(from_dict(kind, value, where).config, kind)
        return
    assert value.keys() <= RunConfig.model_fields.keys()
    for key, section in value.items():  # sections of a run, each by itself
        annotation = RunConfig.model_fields[key].annotation
        annotation = next(iter(get_args(annotation)), annotation)  # of an optional section
        assert isinstance(from_dict(annotation, section, where).config, annotation)


def needed(kind):
    """The keys that a config of this kind cannot do without."""
    return {name for name, field in kind.model_fields.items() if field.is_required()}


@pytest.mark.parametrize(("where", "text"), blocks("python"), ids=lambda value: value if "#" in value[:60] else "")
def test_python_is_python(where, text):
    assert ast.parse(text, where).body


@pytest.mark.slow
def test_line_of_the_python_guide_is_fitted(tmp_path):
    text = next(text for where, text in blocks("python") if "class Points" in text)
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "runs" / "line" / "metrics.jsonl").read_text().splitlines()
    losses = [row["loss/train/total"] for row in map(json.loads, lines) if "loss/train/total" in row]
    assert losses[-1] < 1e-3 < 1 < losses[0]
