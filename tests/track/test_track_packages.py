"""Requirements of extras against the installed packages."""

import pytest

from smalti.track import packages
from smalti.track.packages import Requirement, requirements


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("0.7.30", "~=0.7.26", True),
        ("0.8.0", "~=0.7.26", False),
        ("25.0.1", "<26,>=25", True),
        ("26.0", "<26,>=25", False),
        ("1.0rc1", "==1.0", True),
        ("3.0", "", True),
    ],
)
def test_bounds(version: str, bounds: str, fits: bool) -> None:
    assert (Requirement("x", bounds, version).problem is None) == fits


def test_a_missing_package() -> None:
    assert Requirement("x", ">=1", None).problem == "missing"


def test_extras_of_this_distribution() -> None:
    result = requirements()
    assert next(iter(result)) == "core"
    assert {one.name for one in result["core"]} >= {"torch", "numpy", "pydantic"}
    assert {"data", "serve", "cluster"} <= result.keys()
    assert "ray" in {one.name for one in result["cluster"]}, "what daft[ray] asks for belongs to it"


def test_nothing_is_known_of_a_distribution_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements("no-such-distribution") == {}
    monkeypatch.setattr(packages, "requirements", dict)
    assert packages.package_versions() == {}
