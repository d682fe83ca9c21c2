"""Writes the pages that come from code and results (reference, audit, meshes, the README's table), checks all links.

    python tools/docs.py            write the pages, then check the links
    python tools/docs.py --check    write nothing; exit 3 when a page has drifted from the code or a link is dead

A page of docs/ that cannot be reached from docs/index.md counts as a dead link too.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import reference
from meshes import page as meshes_page
from readme import page as readme_page
from talks.claims import page as claims_page
from talks.page import page as talks_page

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def pages(root: Path) -> list[Path]:
    """Every Markdown file of the repository that people read."""
    return sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("bench/*.md")])


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(text: str) -> Iterator[str]:
    """Targets of the links of a page, code left out."""
    for match in _LINK.finditer(re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))):
        yield match["target"]


def dead_links(root: Path) -> list[str]:
    """Return links to missing targets, and pages under docs/ that docs/index.md does not lead to."""
    failed: list[str] = []
    leads_to: dict[Path, set[Path]] = {}
    for page in pages(root):
        name = page.relative_to(root)
        leads_to[page] = set()
        for target in links(page.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            if not goal.exists():
                failed.append(f"{name} links to {target}, which does not exist")
            elif anchor and goal.suffix == ".md" and anchor not in anchors(goal.read_text(encoding="utf-8")):
                failed.append(f"{name} links to {target}, which has no such heading")
            else:
                leads_to[page].add(goal)
    reached = set[Path]()
    to_visit = [root / "docs" / "index.md"]
    while to_visit:
        page = to_visit.pop()
        if page not in reached:
            reached.add(page)
            to_visit += [goal for goal in leads_to.get(page, ()) if goal.suffix == ".md"]
    alone = [page for page in leads_to if page.is_relative_to(root / "docs") and page not in reached]
    return failed + [f"{page.relative_to(root)} cannot be reached from docs/index.md" for page in alone]


def written() -> dict[str, str]:
    """Path under docs/ -> text, of every page that is written from the code."""
    reference_pages = {f"reference/{name}": text for name, text in reference.pages().items()}
    return {
        **reference_pages,
        "audit/talks.md": talks_page(),
        "audit/claims.md": claims_page(),
        "concepts/distributed/meshes.md": meshes_page(),
        "../README.md": readme_page(),
    }


def main(arguments: list[str]) -> int:
    """Write or check; returns the exit code."""
    if arguments not in ([], ["--check"]):
        print(f"docs.py takes nothing or --check, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    failed: list[str] = []
    for name, text in written().items():
        path = ROOT / "docs" / name
        if arguments:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                failed.append(f"docs/{name} differs from the code; hint: make docs")
        else:
            path.write_text(text, encoding="utf-8")
    failed += dead_links(ROOT)
    for line in failed:
        print(f"docs: {line}", file=sys.stderr)
    print(f"docs: {len(pages(ROOT))} pages, {len(failed)} problems")
    return 3 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
