"""Reference pages match the code, links lead somewhere, and the check finds what does not."""

from pathlib import Path

import reference

import docs

ROOT = Path(__file__).resolve().parents[2]


def repository(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        path = folder / "docs" / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def test_every_link_of_the_documentation_leads_somewhere():
    assert docs.dead_links(ROOT) == []


def test_written_pages_match_the_code():
    different = [name for name, text in docs.written().items() if (ROOT / "docs" / name).read_text() != text]
    assert different == [], "hint: make docs"


def test_dead_link_dead_anchor_and_lonely_page_are_found(tmp_path):
    root = repository(
        tmp_path,
        index="[a](gone.md) [b](other.md#no-such) [c](other.md#two-words) [d](https://example.org) `[e](no.md)`",
        other="# Two words\n```\n[f](gone.md)\n```\n",
        lonely="# Lonely\n",
    )
    assert docs.dead_links(root) == [
        "docs/index.md links to gone.md, which does not exist",
        "docs/index.md links to other.md#no-such, which has no such heading",
        "docs/lonely.md cannot be reached from docs/index.md",
    ]


def test_every_field_of_every_config_is_on_the_page():
    page = reference.config_page()
    for key in ("`model.moe.num_experts`", "`data.stages[].weights`", "`sources.<name>.rules`", "`vocab_size`"):
        assert f"| {key} |" in page
    assert "*Placement.*" in next(line for line in page.splitlines() if "`train.parallel.ranks`" in line)
    assert "*Placement.*" not in next(line for line in page.splitlines() if "`train.global_batch_tokens`" in line)
