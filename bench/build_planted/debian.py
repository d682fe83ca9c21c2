"""Real documents: Debian's documentation in several languages, source packages, and package descriptions.

``apt-get`` downloads packages and, with a list of its own, source packages; neither needs root nor installs anything.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from build_planted.document import LANGUAGES, Document
from smalti.base.errors import UserError
from smalti.data.documents.files import find_files

_HELP = {"de": "de", "en-us": "en", "es": "es", "fr": "fr", "ja": "ja", "it": "it", "nl": "nl", "pl": "pl", "ru": "ru",
         "zh-cn": "zh"}  # fmt: skip
_MAN = {"": "en", "-dev": "en", "-de": "de", "-es": "es", "-fr": "fr", "-ja": "ja", "-it": "it", "-nl": "nl",
        "-pl": "pl", "-pt-br": "pt", "-ru": "ru"}  # fmt: skip
_ENGLISH = ("openjdk-17-doc", "qtbase5-doc-html", "postgresql-doc-15", "libboost1.74-doc", "erlang-doc",
            "python3.11-doc", "debian-policy", "git-doc")  # fmt: skip
_MANUALS = ("maint-guide", "debian-faq", "developers-reference")
PAGES: dict[str, str | None] = {
    **{f"libreoffice-help-{name}": language for name, language in _HELP.items()},
    **dict.fromkeys(_ENGLISH, "en"),
    **{f"{name}{suffix}": suffix[1:] or "en" for name in _MANUALS for suffix in ("", "-de", "-fr")},
    **{f"debian-reference-{language}": language for language in LANGUAGES},
    "developers-reference-ja": "ja",
    "maint-guide-es": "es",
    "maint-guide-ja": "ja",
    "installation-guide-amd64": None,
}
"""Packages with HTML, text and PDF, and their language; None: that of the folder."""
MAN = {f"manpages{name}": language for name, language in _MAN.items()}
CODE = ("python3-django", "python3-sqlalchemy", "python3-twisted", "perl-doc")
SOURCES = ("git", "postgresql-15", "python3.11", "vim", "samba", "linux")
"""Source packages."""
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_FOREIGN_EACH = 500
"""Most pages and manual pages of a package in a language that the recipe does not keep."""
_CODE = (".c", ".h", ".py", ".pl", ".pm", ".sh", ".js", ".sql", ".el", ".yaml", ".java")
_TEXT = (".txt", ".rst", ".md")
_MAX_BYTES = 24_000
_MAX_PAGE_BYTES = 100_000
_FOLDER_LANGUAGE = re.compile(r"/installation-guide-amd64/([a-z]{2})(?:_[A-Z]{2})?/")


class NoData(RuntimeError):
    """A package cannot be downloaded or unpacked."""


def documents(cache: Path) -> list[Document]:
    """Return all documents; downloads into ``cache`` what is not there. Raises NoData."""
    listed: list[Document] = []
    for name, language in PAGES.items():
        listed += _pages(_package(cache, name), name, language)
    for name, language in MAN.items():
        listed += _manual(_package(cache, name), name, language)
    for name in CODE:
        listed += _code(_package(cache, name), name)
    for name in SOURCES:
        listed += _code(_source(cache, name), name)
    return listed + list(_descriptions(cache))


def _run(command: list[str], folder: Path, what: str) -> str:
    try:
        return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip()
        raise NoData(
            f"{what}: {reason}\nhint: run this on Debian 12 after apt-get update, or without packages: --embedded"
        ) from error


def _package(cache: Path, name: str) -> Path:
    """Return the folder of an unpacked package."""
    folder = cache / "unpacked" / name
    if not folder.exists():
        debs = cache / "packages"
        debs.mkdir(parents=True, exist_ok=True)
        if not list(debs.glob(f"{name}_*.deb")):
            print("apt-get download", name, file=sys.stderr, flush=True)
            _run(["apt-get", "download", "-q", name], debs, f"Debian's package {name} could not be downloaded")
        unfinished = cache / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        deb = sorted(debs.glob(f"{name}_*.deb"))[-1]
        _run(["dpkg-deb", "-x", str(deb), str(unfinished)], debs, f"{deb} cannot be unpacked")
        folder.parent.mkdir(exist_ok=True)
        unfinished.rename(folder)
    return folder


def _source(cache: Path, name: str) -> Path:
    """Return the folder of the unpacked upstream files of a source package."""
    folder = cache / "sources" / name
    if not folder.exists():
        downloads = cache / "tarballs"
        downloads.mkdir(parents=True, exist_ok=True)
        if not list(downloads.glob(f"{name}_*.orig.tar.*")):
            print("apt-get source", name, file=sys.stderr, flush=True)
            what = f"Debian's source package {name} could not be downloaded"
            _lists(cache, what)
            _run(["apt-get", "-q", *_options(cache), "source", "--download-only", name], downloads, what)
        tarball = next(path for path in sorted(downloads.glob(f"{name}_*.orig.tar.*")) if path.suffix != ".asc")
        unfinished = cache / "unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _run(["tar", "-xf", str(tarball), "-C", str(unfinished), "--strip-components=1"], downloads, str(tarball))
        folder.parent.mkdir(exist_ok=True)
        unfinished.rename(folder)
    return folder


def _options(cache: Path) -> list[str]:
    return [f"-oDir::Etc::sourcelist={cache}/apt/sources.list", "-oDir::Etc::sourceparts=-",
            f"-oDir::State::lists={cache}/apt/lists", f"-oAcquire::Languages={','.join(LANGUAGES)}"]  # fmt: skip


def _lists(cache: Path, what: str) -> Path:
    """Return the folder of the lists of packages, source packages and descriptions, which apt keeps here only."""
    lists = cache / "apt" / "lists"
    if not list(lists.glob("*_Translation-en.*")):
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        place = f"[signed-by={_KEYS}] http://deb.debian.org/debian bookworm main\n"
        (cache / "apt" / "sources.list").write_text(f"deb {place}deb-src {place}")
        _run(["apt-get", "-q", *_options(cache), "update"], lists, what)
    return lists


def is_read(suffix: str) -> bool:
    """Whether ``smalti data build`` reads files with this suffix."""
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        try:
            return bool(find_files(file.name).files)
        except UserError:
            return False


def _files(root: Path, suffixes: tuple[str, ...], most: int) -> Iterator[tuple[Path, str]]:
    for path in sorted(root.rglob("*")):
        if path.suffix in suffixes and not path.is_symlink() and path.is_file() and 50 < path.stat().st_size <= most:
            name = path.relative_to(root).as_posix()
            if not any(part.startswith(".") for part in name.split("/")):
                yield path, name


def _pages(root: Path, package: str, language: str | None) -> Iterator[Document]:
    n_foreign = 0
    reads_pdf = is_read(".pdf")
    for path, name in _files(root, (".html", ".txt", ".pdf"), _MAX_PAGE_BYTES):
        of_folder = _FOLDER_LANGUAGE.search(name)
        label = language or (of_folder[1] if of_folder else None)
        if label not in (None, "de", "en", "es", "fr", "ja"):
            n_foreign += 1
            if n_foreign > _FOREIGN_EACH and language:
                continue
        source = {".html": "pages", ".txt": "text", ".pdf": "pdf"}[path.suffix]
        if path.suffix != ".pdf" or reads_pdf:
            kind = {"pages": "html", "text": "prose", "pdf": "pdf"}[source]
            yield Document(source, f"{package}/{name}", kind, label, path)


def _manual(root: Path, package: str, language: str) -> Iterator[Document]:
    """Manual pages as text, by ``man``; kept beside the package."""
    texts = root.parent.parent / "manual" / package
    if not (texts / "complete").exists():
        texts.mkdir(parents=True, exist_ok=True)
        pages = [path for path in sorted(root.rglob("*.gz")) if "/man/" in str(path) and not path.is_symlink()]
        if language not in ("de", "en", "es", "fr", "ja"):
            pages = pages[:_FOREIGN_EACH]
        for path in pages:
            command = ["man", "-l", "-E", "UTF-8", str(path)]
            done = subprocess.run(
                command, capture_output=True, check=False, stdin=subprocess.DEVNULL,
                env={"MANWIDTH": "100", "LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            )  # fmt: skip
            if done.returncode == 0 and len(done.stdout) > 300:
                section = path.parent.name
                (texts / f"{section}-{path.name.removesuffix('.gz')}.txt").write_bytes(done.stdout)
        (texts / "complete").write_text("")
    for path in sorted(texts.glob("*.txt")):
        yield Document("man", f"{package}/{path.name}", "prose", language, path)


def _code(root: Path, package: str) -> Iterator[Document]:
    for path, name in _files(root, (*_CODE, *_TEXT), _MAX_BYTES):
        source, kind = ("text", "prose") if path.suffix in _TEXT else ("code", "code")
        yield Document(source, f"{package}/{name}", kind, None, path)


def _descriptions(cache: Path) -> Iterator[Document]:
    """The descriptions of all packages, also translated, as rows of JSONL."""
    lists = _lists(cache, "Debian's descriptions of packages could not be downloaded")
    for language in LANGUAGES:
        file = next(iter(lists.glob(f"*_Translation-{language}.*")))
        done = _run(["/usr/lib/apt/apt-helper", "cat-file", str(file)], lists, str(file))
        texts: dict[str, str] = {}
        for entry in done.split("\n\n"):
            name = re.search(r"^Package: (.+)$", entry, re.MULTILINE)
            text = re.search(rf"^Description-{language}: (.+(?:\n .*)*)", entry, re.MULTILINE)
            if name and text:
                texts[f"{name[1]}.{language}"] = re.sub(r"^ \.?", "", text[1], flags=re.MULTILINE)
        for number, (name_, text_) in enumerate(sorted(texts.items())):
            container = f"{language}-{number // 4000:02d}.jsonl"
            yield Document("descriptions", name_, "prose", language, None, text_, container)
