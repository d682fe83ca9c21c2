"""Which of the packages that Smalti can use are installed: by the requirements of its own distribution."""

import re
from dataclasses import dataclass
from importlib import metadata

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)\s*(?:\[(?P<extras>[^]]*)])?\s*(?P<bounds>[^;]*)")
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_BOUND = re.compile(r"(?P<sign>>=|<=|~=|==|<|>)\s*(?P<version>[0-9][0-9A-Za-z.]*)")


@dataclass(frozen=True)
class Need:
    """One package that is asked for, as it is installed here."""

    name: str
    bounds: str
    version: str | None

    @property
    def problem(self) -> str | None:
        """``missing``, ``1.2 is not >=2``, or None."""
        if self.version is None:
            return "missing"
        if not all(_meets(self.version, one["sign"], one["version"]) for one in _BOUND.finditer(self.bounds)):
            return f"{self.version} is not {self.bounds}"
        return None


def needs(distribution: str = "smalti") -> dict[str, list[Need]]:
    """Extra -> the packages it asks for, ``core`` first; empty where the distribution is not installed."""
    found: dict[str, list[Need]] = {}
    for line in _requirements(distribution):
        extra = _EXTRA.search(line)
        found.setdefault(extra["extra"] if extra else "core", []).extend(_needs_of(line))
    return {extra: found[extra] for extra in ("core", *sorted(found.keys() - {"core"})) if extra in found}


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that Smalti depends on, extras included."""
    versions = {
        one.name.lower(): one.version for listed in needs().values() for one in listed if one.version is not None
    }
    return dict(sorted(versions.items()))


def version_of(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements(distribution: str) -> list[str]:
    try:
        return metadata.requires(distribution) or []
    except metadata.PackageNotFoundError:
        return []


def _needs_of(line: str) -> list[Need]:
    """The package of a requirement, and what its own extras ask for (``daft[ray]``: Ray)."""
    match = _REQUIREMENT.match(line)
    if match is None:
        return []
    found = [Need(match["name"], match["bounds"].strip(), version_of(match["name"]))]
    for extra in (match["extras"] or "").split(","):
        for below in _requirements(match["name"]) if extra.strip() else ():
            of = _EXTRA.search(below)
            inner = _REQUIREMENT.match(below)
            if of is not None and of["extra"] == extra.strip() and inner is not None:
                found.append(Need(inner["name"], inner["bounds"].strip(), version_of(inner["name"])))
    return found


def _meets(version: str, sign: str, bound: str) -> bool:
    have, want = _numbers(version), _numbers(bound)
    width = max(len(have), len(want))
    padded = [numbers + (0,) * (width - len(numbers)) for numbers in (have, want)]
    if sign == "~=":
        return padded[0] >= padded[1] and have[: len(want) - 1] == want[:-1]
    left, right = padded
    return {">=": left >= right, "<=": left <= right, "==": left == right, "<": left < right, ">": left > right}[sign]


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0); what follows the numbers (rc1, post2) does not count."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
