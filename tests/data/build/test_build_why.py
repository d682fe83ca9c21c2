"""``smalti data why`` and ``diff``: what a build did to one document, and how two versions of a set differ."""

import json
import random
import shutil
from pathlib import Path

import pytest
from planted_documents import edited, prose

from smalti.base.errors import DataError
from smalti.config.build import BuildConfig
from smalti.data.build.diff import diff
from smalti.data.build.job import build
from smalti.data.build.why import why


def write(path: Path, texts: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))


def built(folder: Path, output: str = "out", **changes) -> str:
    plain = {"name": output, "inputs": [str(folder / "in")], "output": str(folder / output), "workers": 1}
    build(BuildConfig.model_validate({**plain, "html": "tags", "dedup": "exact", **changes}))
    return str(folder / output)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A build of documents that each rule but one keeps."""
    folder = tmp_path_factory.mktemp("why")
    rng = random.Random(3)
    texts = {f"d{i}": prose(rng, n_sentences=12) for i in range(8)}
    texts["d0"] += "\nAll rights reserved\nMail jane.doe@example.org or not."
    texts |= {"same": texts["d1"], "near": edited(rng, texts["d2"]), "ru": prose(rng, "ru")}
    texts["spam"] = "buy cheap pills now " * 40
    write(folder / "in" / "a.jsonl", texts)
    (folder / "in" / "broken.txt").write_bytes(rng.randbytes(3000))
    built(folder, languages=["en"], dedup="near")
    return folder


def test_a_dropped_document_has_its_step_rule_score_and_limit(place):
    (fate,) = why(str(place / "out"), "spam")
    assert (fate["kept"], fate["step"], fate["rule"]) == (False, "quality", "safe/repetitive-frac")
    assert fate["score"] > fate["limit"]["high"]
    rules = {rule["rule"]: rule for rule in fate["measured"]["rules"]}
    assert not rules["safe/repetitive-frac"]["passes"]
    assert rules["safe/letters"]["passes"]
    (fate,) = why(str(place / "out"), "in/ru")
    assert (fate["step"], fate["measured"]["language"]) == ("language", "ru")
    assert fate["limit"] == {"low": 0.65, "high": None}
    (fate,) = why(str(place / "out"), "broken.txt")
    assert (fate["step"], fate["rule"], fate["measured"]) == ("extract", "extract/encoding", None)


def test_duplicates_name_what_is_kept_and_the_other_way_round(place):
    fates = {name: why(str(place / "out"), name)[0] for name in ("d1", "same", "d2", "near")}
    assert fates["same"]["rule"] == "dedup/exact"
    assert [partner["id"] for partner in fates["same"]["partners"]] == ["d1"]
    assert fates["d1"]["kept_instead_of"]["examples"] == [{"id": "same", "source": "in", "rule": "dedup/exact"}]
    loser, winner = sorted(("d2", "near"), key=lambda name: fates[name]["kept"])
    assert (fates[loser]["rule"], fates[loser]["limit"]["high"]) == ("dedup/near", 0.65)
    assert fates[loser]["score"] >= 0.65
    assert fates[loser]["partners"][0] == fates[loser]["partners"][-1] | {"id": winner, "kept": True}


def test_edits_are_shown_from_the_extracted_to_the_final_text(place):
    (fate,) = why(str(place / "out"), "d0")
    assert fate["kept"]
    assert fate["measured"]["pii"] == {"email": 1}
    changed = [(change["before"], change["after"]) for change in fate["edits"]["examples"]]
    assert ("All rights reserved\nMail jane.doe@example.org", "Mail [EMAIL]") in changed or (
        "All rights reserved\n", "") in changed  # fmt: skip
    assert why(str(place / "out"), "d3")[0]["edits"]["changes"] == 0


def test_a_duplicate_of_a_document_that_a_later_step_dropped_leads_to_the_one_that_stays(tmp_path):
    rng = random.Random(4)
    text = prose(rng, n_sentences=30)
    close = edited(rng, text)
    write(tmp_path / "in" / "a.jsonl", {"first": text, "second": close, "third": close})
    built(tmp_path, dedup="near")
    (fate,) = why(str(tmp_path / "out"), "third")
    assert [(row["id"], row["kept"]) for row in fate["partners"]] == [("second", False), ("first", True)]


def test_without_the_steps_the_output_still_answers(place, tmp_path):
    shutil.copytree(place / "out", tmp_path / "out")
    (fate,) = why(str(tmp_path / "out"), "spam")
    assert (fate["rule"], fate["measured"]) == ("safe/repetitive-frac", None)
    with pytest.raises(DataError, match="no document 'd'") as caught:
        why(str(tmp_path / "out"), "d")
    assert "in/d0" in caught.value.hint


def test_a_difference_adds_up_and_names_the_reasons(tmp_path):
    rng = random.Random(5)
    texts = {f"d{i}": prose(rng) for i in range(20)} | {"ru": prose(rng, "ru"), "mail": f"{prose(rng)} a.b@example.org"}
    write(tmp_path / "in" / "a.jsonl", texts | {"twice": prose(rng)})
    write(tmp_path / "in" / "b.jsonl", {"twice": prose(rng)})
    first = built(tmp_path, "first")
    more = {"new": prose(rng), "copy": texts["d3"]}
    write(tmp_path / "in" / "a.jsonl", {name: text for name, text in texts.items() if name != "d5"} | more)
    second = built(tmp_path, "second", languages=["en"], pii="keep")
    values = diff(first, second)

    def table(kind: str) -> dict:
        return {row["rule"]: (row["documents"], row["examples"]) for row in values[kind]}

    # Of the id that was there twice the second is gone, and the first has the text of the second.
    assert {rule: row[0] for rule, row in table("removed").items()} == {"language": 1, "not read": 2}
    assert table("removed")["language"] == (1, ["ru"])
    assert table("added") == {"not read": (1, ["new"])}
    assert table("changed") == {"edited": (2, ["mail", "twice"])}
    totals, sizes = values["totals"], [values[name] for name in ("first", "second")]
    for unit in ("documents", "bytes"):
        grown = totals["added"][unit] - totals["removed"][unit]
        grown += totals["changed"]["bytes"] if unit == "bytes" else 0
        assert sizes[1][unit] - sizes[0][unit] == grown
    assert totals["unchanged"]["documents"] == 19
    assert set(values["recipe"]) == {"name", "languages", "pii"}
    # The other way round what was removed is added, with the reason for which it was not there.
    back = diff(second, first)
    assert {row["rule"]: row["documents"] for row in back["added"]} == {"language": 1, "not read": 2}
    same = diff(first, first)
    assert {name: count["documents"] for name, count in same["totals"].items()} == {
        "added": 0, "removed": 0, "changed": 0, "unchanged": values["first"]["documents"]
    }  # fmt: skip


def test_a_document_that_moves_to_the_other_split_is_a_change(tmp_path):
    rng = random.Random(6)
    write(tmp_path / "in" / "a.jsonl", {f"d{i}": prose(rng) for i in range(30)})
    values = diff(built(tmp_path, "first"), built(tmp_path, "second", heldout_frac=0.3))
    (row,) = values["changed"]
    assert (row["step"], row["rule"], row["bytes"]) == ("split", "moved", 0)
    assert 0 < row["documents"] < 30
