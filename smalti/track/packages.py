"""Installed versions of the packages that Smalti requires or can use, as its distribution's metadata lists them."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import metadata

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^]]*)])?\s*(?P<bounds>[^;]*)")
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_BOUND = re.compile(r"(?P<sign>>=|<=|~=|==|<|>)\s*(?P<version>[0-9][0-9A-Za-z.]*)")


@dataclass(frozen=True)
class Requirement:
    """A required package and its installed version."""

    name: str
    bounds: str
    version: str | None

    @property
    def problem(self) -> str | None:
        """Why the requirement is not met: ``missing`` or ``1.2 is not >=2``; None if it is."""
        if self.version is None:
            return "missing"
        if not all(_meets(self.version, bound["sign"], bound["version"]) for bound in _BOUND.finditer(self.bounds)):
            return f"{self.version} is not {self.bounds}"
        return None


def requirements(distribution: str = "smalti") -> dict[str, list[Requirement]]:
    """Return extra -> its requirements, ``core`` first; empty where the distribution is not installed."""
    by_extra: dict[str, list[Requirement]] = {}
    for line in _requires(distribution):
        extra = _EXTRA.search(line)
        by_extra.setdefault(extra["extra"] if extra else "core", []).extend(_requirements_of(line))
    return {extra: by_extra[extra] for extra in ("core", *sorted(by_extra.keys() - {"core"})) if extra in by_extra}


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that Smalti depends on, extras included."""
    versions = {
        package.name.lower(): package.version
        for packages in requirements().values()
        for package in packages
        if package.version is not None
    }
    return dict(sorted(versions.items()))


@cache
def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, or None; parsing the metadata of all takes 50 ms."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def _requires(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def _requirements_of(line: str) -> list[Requirement]:
    """Return a requirement and those of its extras (``daft[ray]``: Ray)."""
    match = _REQUIREMENT.match(line)
    if match is None:
        return []
    result = [Requirement(match["name"], match["bounds"].strip(), version_of(match["name"]))]
    for extra in (match["extras"] or "").split(","):
        for below in _requires(match["name"]) if extra.strip() else ():
            of = _EXTRA.search(below)
            inner = _REQUIREMENT.match(below)
            if of is not None and of["extra"] == extra.strip() and inner is not None:
                result.append(Requirement(inner["name"], inner["bounds"].strip(), version_of(inner["name"])))
    return result


def _meets(version: str, sign: str, bound: str) -> bool:
    installed = _numbers(version)
    required = _numbers(bound)
    width = max(len(installed), len(required))
    padded = [numbers + (0,) * (width - len(numbers)) for numbers in (installed, required)]
    if sign == "~=":
        return padded[0] >= padded[1] and installed[: len(required) - 1] == required[:-1]
    left, right = padded
    return {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}[sign]


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 13, 0) for ``2.13.0+cpu``; suffixes (rc1, post2) are ignored."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
