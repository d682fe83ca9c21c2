"""The data of the study: documents of Debian packages, or of the installed Python for a quick run.

Packages are downloaded by ``apt-get download``, which needs no root, and unpacked by ``dpkg-deb``, without installing.
Their Python sources are the code, their plain-text documentation the prose; both are curated, deduplicated and
tokenised by Smalti's commands, which hold 5 % of the files out.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo_runs import smalti

from experts_study.settings import SHARES, Size

CODE = {
    "calibre": "GPL-3",
    "mercurial-common": "GPL-2+",
    "python3-astropy": "BSD-3-clause",
    "python3-django": "BSD-3-clause",
    "python3-matplotlib": "PSF-based",
    "python3-networkx": "BSD-3-clause",
    "python3-nltk": "Apache-2.0",
    "python3-pandas": "BSD-3-clause",
    "python3-sqlalchemy": "MIT",
    "python3-twisted": "MIT",
}
"""Packages with Python sources, and their licences."""
PROSE = {
    "cmake-doc": "BSD-3-clause",
    "debian-policy": "GPL-2+",
    "git-doc": "GPL-2",
    "linux-doc-6.1": "GPL-2",
    "perl-doc": "Artistic or GPL-1+",
    "python3.11-doc": "PSF-2",
}
"""Packages with documentation as text (reStructuredText, AsciiDoc, POD), and their licences."""
SUFFIXES = {"code": (".py",), "prose": (".txt", ".pod")}


class NoData(RuntimeError):
    """The data is missing or too small, or packages cannot be downloaded."""


def prepare(folder: Path, size: Size, versions: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """Write token files below ``folder`` unless they are there. Return what ``read`` does.

    versions: of the packages of a study that is continued; a package without one is downloaded in its newest version.
    """
    data = _folder(folder, size)
    summary = data / "corpus.json"
    if not summary.exists():
        shutil.rmtree(data, ignore_errors=True)  # left by a stop
        data.mkdir(parents=True)
        packages = folder / "packages"
        raw = data / "raw"
        sources = _debian(packages, raw, versions) if size.debian else _python(raw, size.thin)
        _tokenize(data, sources, size.vocab)
        summary.write_text(json.dumps(_summary(data, _packages(packages, versions) if size.debian else [])))
        for name in ("raw", "curated", "unique"):
            shutil.rmtree(data / name)
    return read(folder, size)


def read(folder: Path, size: Size) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the token files, and what the data is. Raises NoData if it is missing or too small."""
    data = _folder(folder, size)
    if not (data / "corpus.json").exists():
        raise NoData(f"{data} has no finished data")
    corpus = json.loads((data / "corpus.json").read_text())
    for name, share in SHARES.items():
        unique, needed = corpus["sources"][name]["train"]["n_tokens"], round(share * size.tokens)
        if unique < needed:
            raise NoData(f"{name}: {unique:,} unique tokens, and the longest run reads {needed:,}")
    return data / "tokens", corpus


def _folder(folder: Path, size: Size) -> Path:
    return folder / f"data-{'debian' if size.debian else 'python'}-{size.vocab}"


def _debian(packages: Path, raw: Path, versions: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    for source, names in (("code", CODE), ("prose", PROSE)):
        for name in names:
            _unpack(package(packages, name, versions.get(name)), raw / source / name, SUFFIXES[source])
    return {name: {"path": str(raw / name), "rules": [f"{name}-light"]} for name in SHARES}


def package(packages: Path, name: str, version: str | None) -> Path:
    """Return the .deb of a package, downloaded if it is not there. Raises NoData."""
    wanted = name if version is None else f"{name}={version}"
    # in file names a colon of a version is written as %3a
    pattern = f"{name}_{'*' if version is None else version.replace(':', '%3a') + '_*'}.deb"
    if not (files := sorted(packages.glob(pattern))):
        print("apt-get download", wanted, file=sys.stderr, flush=True)
        partial = packages / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            subprocess.run(
                ["apt-get", "download", "-q", wanted], cwd=partial, capture_output=True, text=True, check=True
            )
            files = [path.rename(packages / path.name) for path in partial.glob(pattern)]
        except (OSError, subprocess.CalledProcessError) as error:
            reason = str(getattr(error, "stderr", "") or error).strip()
            raise NoData(
                f"Debian's package {wanted} could not be downloaded: {reason}\n"
                "hint: run this on Debian 12 after apt-get update, or put the .deb files of these packages into "
                f"{packages} (dpkg-deb must be installed): {' '.join((*CODE, *PROSE))}"
            ) from error
    return files[-1]


def _unpack(package: Path, target: Path, suffixes: tuple[str, ...]) -> None:
    """Unpack the files with one of the ``suffixes``; .pod is renamed to .txt, which ``smalti data curate`` reads."""
    everything = target.with_name(target.name + ".all")
    everything.mkdir(parents=True)
    subprocess.run(["dpkg-deb", "-x", str(package), str(everything)], check=True)
    for path in sorted(everything.rglob("*")):
        if path.suffix in suffixes and path.is_file() and not path.is_symlink():
            place = target / path.relative_to(everything)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place.with_name(place.name + ".txt") if path.suffix == ".pod" else place)
    shutil.rmtree(everything)


def _python(raw: Path, thin: int) -> dict[str, dict[str, Any]]:
    smalti(raw.parent, "data", "documents", str(raw))
    for path in raw.glob("*.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[::thin]))
    return {name: {"path": str(raw / f"{name}.jsonl"), "id_field": "id", "rules": [f"{name}-light"]} for name in SHARES}


def _tokenize(data: Path, sources: dict[str, dict[str, Any]], vocab: int) -> None:
    configs: dict[str, dict[str, Any]] = {
        "curate": {"sources": sources, "heldout_frac": 0.05, "group_field": "group", "output": str(data / "curated")},
        "dedup": {"documents": str(data / "curated"), "output": str(data / "unique")},
        "tokenize": {"documents": str(data / "unique"), "output": str(data / "tokens"), "vocab_size": vocab},
    }
    for verb, values in configs.items():
        path = data / f"{verb}.yaml"
        path.write_text(json.dumps(values))  # JSON is YAML
        print("smalti data", verb, path, file=sys.stderr, flush=True)
        smalti(data, "data", verb, str(path))


def _packages(packages: Path, versions: Mapping[str, str]) -> list[dict[str, str]]:
    rows = []
    for name, licence in (CODE | PROSE).items():
        command = ["dpkg-deb", "-f", str(package(packages, name, versions.get(name))), "Version"]
        version = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        rows.append({"name": name, "version": version, "licence": licence})
    return rows


def _summary(data: Path, packages: list[dict[str, str]]) -> dict[str, Any]:
    names = ("n_documents", "n_text_bytes", "n_tokens", "digest")
    sources = {}
    for source in SHARES:
        manifests = {
            split: json.loads((data / "tokens" / source / split / "manifest.json").read_text())
            for split in ("train", "heldout")
        }
        sources[source] = {split: {name: manifest[name] for name in names} for split, manifest in manifests.items()}
    return {"packages": packages, "sources": sources}
