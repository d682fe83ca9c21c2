"""The whole deduplication: planted corpora, traps, exactness, kills, stages, errors."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import synthetic_corpus
from conftest import PROVE
from synthetic_corpus import PlantedDocument

from smalti.base.errors import CheckFailed, DataError, UserError
from smalti.cli.main import run
from smalti.config.dedup import DedupConfig
from smalti.data.documents.parquet import read_documents
from smalti.data.documents.publish import only_writer
from smalti.data.prepare.dedup.job import dedup
from smalti.data.prepare.dedup.work_folder import WorkFolder


def config_of(folder: Path, output: Path, **changes) -> DedupConfig:
    return DedupConfig(documents=str(folder), output=str(output), **changes)


def drops_of(output: Path) -> dict[str, dict]:
    rows = [row for path in sorted(output.glob("drops/*.parquet")) for row in pq.read_table(path).to_pylist()]
    return {row["id"]: row for row in rows}


def kept_of(output: Path) -> set[str]:
    return {row["id"] for path in output.glob("documents/*/*.parquet") for row in read_documents(path)}


def files_of(output: Path) -> dict[str, str]:
    paths = sorted(path for path in output.rglob("*") if path.is_file() and ".stages" not in path.parts)
    return {path.relative_to(output).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def texts(**named: str) -> list[PlantedDocument]:
    return [PlantedDocument(name, text, "base") for name, text in named.items()]


def made(n: int, seed: int, vocabulary: int = 3000) -> str:
    rng = random.Random(seed)
    return " ".join(f"w{rng.randrange(vocabulary)}" for _ in range(n))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    documents = synthetic_corpus.planted(3000, seed=5)
    return synthetic_corpus.write_parquet(documents, tmp_path_factory.mktemp("corpus") / "documents"), documents


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory):
    """The output of one uninterrupted run on the corpus at the defaults, and its progress calls."""
    output = tmp_path_factory.mktemp("whole") / "out"
    calls: list[tuple] = []
    dedup(config_of(corpus[0], output), lambda *call: calls.append(call))
    return output, calls


@pytest.mark.slow
def test_copies_and_edits_go_and_nothing_else(tmp_path, proof, record):
    """Recall and precision on copies and 5 % edits; shared boilerplate and books of one vocabulary stay."""
    n = proof(short=2000, full=100_000)
    documents = synthetic_corpus.planted(n, seed=1)
    report = dedup(config_of(synthetic_corpus.write_parquet(documents, tmp_path / "c"), tmp_path / "out"))
    scores = synthetic_corpus.score(documents, set(drops_of(tmp_path / "out")))
    figures = {kind: {"recall": one.recall, "precision": one.precision, **vars(one)} for kind, one in scores.items()}
    record("dedup-planted", {"documents": n, "scores": figures, "selftest": report.selftest.as_json()})
    for kind in ("exact", "edited", "all"):
        assert scores[kind].recall >= 0.99, figures
        assert scores[kind].precision >= 0.99, figures
    assert scores["boilerplate"].wrong == scores["book"].wrong == 0
    assert report.selftest.recall >= 0.99
    assert report.selftest.precision == 1.0


@pytest.mark.slow
def test_both_sentence_traps(tmp_path, proof):
    repeats = proof(short=1500, full=60_000)
    documents = synthetic_corpus.sentence_trap(repeats)
    report = dedup(config_of(synthetic_corpus.write_parquet(documents, tmp_path / "c"), tmp_path / "out"))
    gone = drops_of(tmp_path / "out")
    assert not [name for name in gone if name.startswith("among")]
    assert sum(name.startswith("alone") for name in gone) >= repeats - 1
    assert report.n_candidates < 28 * 8 * len(documents)
    assert synthetic_corpus.score(documents, set(gone))["all"].recall == 1.0


@pytest.mark.slow
def test_the_drops_equal_those_of_counting_all_pairs(tmp_path):
    """With enough bands everything near is proposed: the result equals brute force over all pairs, then greedy."""
    rng = random.Random(3)
    bases = [made(rng.randrange(1, 60), seed) for seed in range(40)]
    by_id = {f"d{i:03d}": bases[i % 40] for i in range(120)}
    for name, text in by_id.items():
        words = text.split()
        for _ in range(rng.randrange(0, 6)):
            words[rng.randrange(len(words))] = f"e{rng.randrange(99)}"
        by_id[name] = " ".join(words).upper() if rng.random() < 0.3 else ", ".join(words)
    folder = synthetic_corpus.write_parquet(texts(**by_id), tmp_path / "c")
    dedup(config_of(folder, tmp_path / "out", bands=60, rows=1, threshold=0.5, shingle_words=2))
    sets = {}
    for name, text in by_id.items():
        words = text.lower().replace(",", " ").split()
        sets[name] = {tuple(words[i : i + 2]) for i in range(max(1, len(words) - 1))}
    near = {
        frozenset((a, b)) for a, b in combinations(sets, 2) if len(sets[a] & sets[b]) >= 0.5 * len(sets[a] | sets[b])
    }
    kept: list[str] = []
    for name in sorted(by_id):
        if not any(frozenset((name, other)) in near for other in kept):
            kept.append(name)
    assert kept_of(tmp_path / "out") == set(kept)
    for name, row in drops_of(tmp_path / "out").items():
        partner = row["partner"].partition("/")[2]
        assert partner in kept
        assert row["score"] == pytest.approx(len(sets[name] & sets[partner]) / len(sets[name] | sets[partner]))


@pytest.mark.slow
def test_the_order_and_the_files_of_the_input_change_nothing(tmp_path, corpus, whole):
    _, documents = corpus
    turned = random.Random(0).sample(documents, len(documents))
    synthetic_corpus.write_parquet(turned, tmp_path / "c", files=3)
    dedup(config_of(tmp_path / "c", tmp_path / "b", memory_gb=0.004, selftest_documents=40))  # and many small portions
    assert kept_of(whole[0]) == kept_of(tmp_path / "b")


@pytest.mark.slow
def test_held_out_documents_stay_and_near_training_ones_go(tmp_path):
    text, other = made(80, 1), made(80, 2)
    documents = texts(a=text, b=f"new {text}", c=f"{text} end", d=other, e=made(80, 3), f=other)
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c", files=2, heldout=("b", "c", "d"))
    report = dedup(config_of(folder, tmp_path / "out"))
    gone = drops_of(tmp_path / "out")
    assert {name: row["rule"] for name, row in gone.items()} == {
        "a": "dedup/near-heldout",
        "f": "dedup/same-words-as-heldout",
    }
    assert report.near_heldout_documents == 2


@pytest.mark.slow
def test_small_empty_and_foreign_texts(tmp_path):
    documents = texts(
        a="", b="", c="!!", d="??", e="one", f="One.", g="two words", h="words two",
        i="你好世界 今天天气很好", j="你好世界。今天天气很好", k="été", l="ÉTÉ!",
    )  # fmt: skip
    report = dedup(config_of(synthetic_corpus.write_parquet(documents, tmp_path / "c", files=1), tmp_path / "out"))
    assert set(drops_of(tmp_path / "out")) == {"b", "f", "j", "l"}
    assert report.selftest.expected > 0
    assert report.selftest.recall == 1.0  # words of one character each


FAMILY_WORDS = 200


def family(n: int, first: int = 0, of: int = 0) -> list[PlantedDocument]:
    """Copies of one text, each with 5 % of its words replaced in one place: all near to each other."""
    template = made(FAMILY_WORDS, -1 - of).split()
    documents = []
    for number in range(first, first + n):
        rng = random.Random(number)
        words = list(template)
        at = rng.randrange(FAMILY_WORDS - 10)
        words[at : at + 10] = [f"u{rng.randrange(10**6)}" for _ in range(10)]
        documents.append(PlantedDocument(f"d{number:06d}", " ".join(words), "base"))
    return documents


def shingles_of(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}


def greedy(documents: list[PlantedDocument], heldout: set[str] = frozenset()) -> set[str]:
    """By comparing with all that stay."""
    kept: dict[str, set] = {}
    for document in sorted(documents, key=lambda one: (one.id not in heldout, one.id)):
        own = shingles_of(document.text)
        near = any(len(own & other) >= 0.65 * len(own | other) for other in kept.values())
        if document.id in heldout or not near:
            kept[document.id] = own
    return set(kept)


@pytest.mark.exhaustive
def test_a_family_of_thousands_keeps_what_comparing_all_pairs_keeps(tmp_path):
    size = 2500 if PROVE else 1100
    documents = [*family(size, of=0), *family(500, first=size, of=1)]
    documents += [PlantedDocument(f"x{i:03d}", made(200, 1000 + i), "base") for i in range(100)]
    heldout = {"d000007", "d001000", f"d{size + 100:06d}"}
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c", heldout=heldout)
    dedup(config_of(folder, tmp_path / "out", alarm_frac=1))
    assert kept_of(tmp_path / "out") == greedy(documents, heldout)
    turned = random.Random(0).sample(documents, len(documents))
    folder = synthetic_corpus.write_parquet(turned, tmp_path / "d", files=3, heldout=heldout)
    dedup(config_of(folder, tmp_path / "turned", memory_gb=0.001))
    assert kept_of(tmp_path / "turned") == kept_of(tmp_path / "out")


@pytest.mark.exhaustive
def test_near_documents_that_differ_from_each_other_are_dropped_as_by_comparing_all_pairs(tmp_path):
    """Three texts and their mixtures: near is not transitive, and buckets have all three."""
    first, second = made(FAMILY_WORDS, -1).split(), made(FAMILY_WORDS, -2).split()
    documents = []
    for number in range(600):
        rng = random.Random(number)
        cut = rng.choice((0, 40, 80)) + rng.randrange(8)
        words = [*second[:cut], *first[cut:]]
        at = rng.randrange(FAMILY_WORDS - 4)
        words[at : at + 4] = [f"u{rng.randrange(10**6)}" for _ in range(4)]
        documents.append(PlantedDocument(f"d{number:03d}", " ".join(words), "base"))
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c")
    dedup(config_of(folder, tmp_path / "out", alarm_frac=1, bands=100))
    assert kept_of(tmp_path / "out") == greedy(documents)


@pytest.mark.exhaustive
def test_the_selftest_works_in_scripts_without_blanks_and_on_long_and_short_documents(tmp_path):
    def letters(seed: int, n: int) -> str:
        rng = random.Random(seed)
        return "".join(chr(0x4E00 + rng.randrange(3000)) for _ in range(n))

    corpora = {
        "chinese": [letters(i, 300) for i in range(40)],
        "long": [made(30_000, i) for i in range(3)],
        "short": [made(9, i) for i in range(40)],
    }
    for name, corpus_texts in corpora.items():
        documents = [PlantedDocument(f"d{i:03d}", text, "base") for i, text in enumerate(corpus_texts)]
        folder = synthetic_corpus.write_parquet(documents, tmp_path / name, files=1)
        report = dedup(config_of(folder, tmp_path / f"{name}-out"))
        assert report.selftest.recall >= 0.98, name
        assert report.selftest.expected >= (50 if name != "long" else 9), name
        assert not drops_of(tmp_path / f"{name}-out")


def test_an_empty_selftest_is_noted(tmp_path, capsys):
    folder = synthetic_corpus.write_parquet(texts(a="one", b="two words"), tmp_path / "c", files=1)
    report = dedup(config_of(folder, tmp_path / "out"))
    assert report.selftest.recall is None
    assert report.as_json()["dedup"]["selftest"]["recall"] is None
    assert "NOTHING WAS TESTED" in report.selftest_line()


@pytest.mark.slow
def test_the_selftest_stops_a_config_that_takes_unrelated_texts_for_near(tmp_path):
    documents = synthetic_corpus.planted(400, seed=3, share={"base": 1.0})
    folder = synthetic_corpus.write_parquet(documents, tmp_path / "c")
    with pytest.raises(CheckFailed, match="50 unrelated planted documents to be near"):
        dedup(config_of(folder, tmp_path / "out", shingle_words=1))


@pytest.mark.slow
def test_containment_finds_a_document_inside_another(tmp_path):
    small = made(60, 1)
    folder = synthetic_corpus.write_parquet(texts(a=f"{small} {made(60, 2)}", b=small), tmp_path / "c", files=1)
    dedup(config_of(folder, tmp_path / "plain"))
    assert not drops_of(tmp_path / "plain")
    dedup(config_of(folder, tmp_path / "out", containment=0.9, rows=2))
    assert drops_of(tmp_path / "out")["b"]["reason"] == "containment 1.000 with part-0/a"


@pytest.mark.slow
def test_a_score_column_chooses_who_stays(tmp_path):
    text = made(80, 1)
    folder = synthetic_corpus.write_parquet(texts(a=text, b=f"{text} longer"), tmp_path / "c", files=1)
    dedup(config_of(folder, tmp_path / "out", score_field="n_bytes"))
    assert set(drops_of(tmp_path / "out")) == {"a"}
    paths = sorted((folder / "documents/part-0").iterdir())
    tables = [pq.read_table(path) for path in paths]
    large = pa.array([2**53 + 1, 2**60 + 1], pa.int64())
    for field, values, gone in (
        ("large", large, "a"),
        ("quality", pa.array([float("nan"), 0.0]), "a"),
        ("quality", pa.array([-1.0, None]), "b"),
    ):
        for path, table in zip(paths, tables, strict=True):
            pq.write_table(table.append_column(field, values.slice(0, len(table))), path)
        dedup(config_of(folder, tmp_path / "out", score_field=field))
        assert set(drops_of(tmp_path / "out")) == {gone}
    for path, table in zip(paths, tables, strict=True):
        pq.write_table(table, path)
    with pytest.raises(UserError, match="score_field=quality is not a numeric column"):
        dedup(config_of(folder, tmp_path / "other", score_field="quality"))


KILLED = """
import os, signal, sys
from smalti.config.dedup import DedupConfig
from smalti.data.prepare.dedup import job
after, rename = sys.argv[3], os.replace
def replace(source, to):
    if os.path.basename(str(to)) == after:
        os.kill(os.getpid(), signal.SIGKILL)  # before the stage has its name
    rename(source, to)
os.replace = replace
job.dedup(DedupConfig(documents=sys.argv[1], output=sys.argv[2]))
"""


@pytest.mark.exhaustive
def test_a_kill_at_any_stage_changes_no_byte(tmp_path, corpus, whole):
    folder, _ = corpus
    for stage in ("signatures", "candidates", "shingles", "pairs", "decisions", "documents"):
        arguments = [str(folder), str(tmp_path / "killed"), stage]
        done = subprocess.run([sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=120)
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(list((tmp_path / "killed/.stages").iterdir())) >= 5  # each process continued after the last whole stage
    dedup(config_of(folder, tmp_path / "killed"))
    assert files_of(tmp_path / "killed") == files_of(whole[0])
    assert not (tmp_path / "killed/.stages").exists()


@pytest.mark.slow
def test_a_kill_at_any_time_changes_no_byte(tmp_path, corpus, whole):
    folder, _ = corpus
    command = [sys.executable, "-m", "smalti", "data", "dedup", "demo-dedup", f"documents={folder}"]
    stages = tmp_path / "killed/.stages"
    for delay_s in (0.0, 0.1, 0.2):
        child = subprocess.Popen([*command, f"output={tmp_path / 'killed'}"], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while child.poll() is None and not list(stages.glob(".*.tmp")) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(delay_s)
        child.kill()
        assert child.wait() == -signal.SIGKILL, "it had ended before"
    assert stages.exists()
    dedup(config_of(folder, tmp_path / "killed"))
    assert files_of(tmp_path / "killed") == files_of(whole[0])


@pytest.mark.slow
def test_stages_that_are_kept_are_used_and_can_be_done_again(tmp_path, corpus):
    folder, _ = corpus
    output, stages = tmp_path / "out", tmp_path / "out/.stages"

    def times(**changes):
        dedup(config_of(folder, output, keep_stages=True, **changes))
        return {path.parent.name: path.stat().st_mtime_ns for path in stages.glob("*/stage.json")}

    first = times()
    before = files_of(output)
    assert times() == first
    other = times(threshold=0.9)
    assert [name for name in first if first[name] != other[name]] == ["decisions"]
    again = times(from_stage="shingles")
    assert {name for name in first if again[name] == first[name]} == {"signatures", "boilerplate", "candidates"}
    assert files_of(output) == before
    os.rename(stages / "candidates", tmp_path / "away")
    assert {name for name, at in times().items() if at == again[name]} == {"signatures", "boilerplate"}
    assert files_of(output) == before


@pytest.mark.exhaustive
def test_a_work_folder_keeps_what_others_have_in_it(tmp_path, corpus):
    folder, _ = corpus
    work = tmp_path / "work [1]*"  # signs of a pattern
    for name in ("signatures", "failures", "pairs"):
        (work / name).mkdir(parents=True)
        (work / name / "mine.json").write_text("{}")
    dedup(config_of(folder, tmp_path / "out", work=str(work)))
    assert sorted(path.relative_to(work).as_posix() for path in work.rglob("*.json")) == [
        "failures/mine.json",
        "pairs/mine.json",
        "signatures/mine.json",
    ]


@pytest.mark.slow
def test_two_runs_do_not_share_a_work_folder(tmp_path, corpus):
    folder, _ = corpus
    (tmp_path / "smalti-dedup").mkdir()
    with only_writer(tmp_path / "smalti-dedup"), pytest.raises(UserError, match="another process is writing"):
        dedup(config_of(folder, tmp_path / "out", work=str(tmp_path)))


def test_the_record_of_a_stage_is_removed_first(tmp_path, monkeypatch):
    stages = WorkFolder(tmp_path, "documents")
    stages.stage("signatures", {}, lambda to: (to / "rows").mkdir())
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: None)  # as if it had been killed there
    stages.remove()
    assert (tmp_path / "signatures/rows").exists()
    assert not (tmp_path / "signatures/stage.json").exists()


@pytest.mark.slow
def test_the_selftest_stops_a_config_that_finds_too_little(tmp_path, corpus):
    folder, _ = corpus
    with pytest.raises(CheckFailed, match="self-test found") as caught:
        dedup(config_of(folder, tmp_path / "out", bands=2, rows=12))
    assert "bands=4" in str(caught.value)
    assert not (tmp_path / "out/documents").exists()


@pytest.mark.exhaustive
def test_the_selftest_does_not_change_the_result(tmp_path, corpus):
    folder, _ = corpus
    dedup(config_of(folder, tmp_path / "few", selftest_documents=20))
    dedup(config_of(folder, tmp_path / "many", selftest_documents=600))
    few, many = files_of(tmp_path / "few"), files_of(tmp_path / "many")
    assert {name: few[name] for name in few if name.endswith(".parquet")} == {
        name: many[name] for name in many if name.endswith(".parquet")
    }


def test_a_damaged_file_is_our_error_from_the_worker(tmp_path):
    folder = synthetic_corpus.write_parquet(synthetic_corpus.planted(300), tmp_path / "c", files=1)
    path = folder / "documents/part-0/train.parquet"
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train\.parquet cannot be read"):
        dedup(config_of(folder, tmp_path / "out", selftest_documents=20))


def test_folders_that_would_be_lost_are_refused(tmp_path, corpus):
    folder, _ = corpus
    with pytest.raises(UserError, match="one folder contains the other"):
        dedup(config_of(folder, folder / "out"))
    other = synthetic_corpus.write_parquet(synthetic_corpus.planted(100), tmp_path / "other")
    with pytest.raises(UserError, match="would be lost"):
        dedup(config_of(folder, other))
    with pytest.raises(DataError, match="was not written by 'smalti data curate'"):
        dedup(config_of(tmp_path / "nothing", tmp_path / "out"))


@pytest.mark.slow
def test_a_missing_cluster_is_an_error_at_once(tmp_path, corpus):
    pytest.importorskip("ray")
    folder, _ = corpus
    # In a process of its own: this one has chosen its runner.
    command = [sys.executable, "-m", "smalti", "data", "dedup", "demo-dedup", f"documents={folder}", "runner=ray"]
    arguments = [f"output={tmp_path / 'out'}", "ray_address=127.0.0.1:1"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the Ray cluster at '127.0.0.1:1' cannot be used" in done.stderr


@pytest.mark.slow
def test_an_alarm_is_loud_exits_with_3_and_leaves_the_result(tmp_path, capsys):
    text = made(80, 1)
    folder = synthetic_corpus.write_parquet(texts(a=text, b=f"{text} x", c=f"{text} y"), tmp_path / "c", files=1)
    arguments = ["data", "dedup", "demo-dedup", f"documents={folder}", f"output={tmp_path / 'out'}"]
    assert run(arguments) == 3
    out, err = capsys.readouterr()
    assert "ALARM: part-0 lost 66.7% of its training documents" in err
    assert "self-test: recall 1.0000" in out
    assert kept_of(tmp_path / "out") == {"a"}
    assert "**ALARM**" in (tmp_path / "out/report.md").read_text()
    assert run([*arguments, "alarm_frac=0.7"]) == 0


def test_a_dry_run_counts_texts_as_a_curation_does(tmp_path, capsys):
    folder = synthetic_corpus.write_parquet(texts(a="é" * 700, b="b" * 100), tmp_path / "c", files=1)
    arguments = ["data", "dedup", "demo-dedup", f"documents={folder}", f"output={tmp_path / 'out'}", "--dry-run"]
    assert run([*arguments, "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert splits["part-0/train"] == {"documents": 2, "bytes": 1500}


@pytest.mark.parametrize("option", ["output", "work"])
def test_a_place_that_takes_no_folder_exits_2(tmp_path, corpus, capsys, option):
    folder, _ = corpus
    places = {"output": str(tmp_path / "out"), "work": str(tmp_path / "work"), option: "/proc/smalti"}
    arguments = [f"{name}={place}" for name, place in places.items()]
    assert run(["data", "dedup", "demo-dedup", f"documents={folder}", *arguments]) == 2
    assert "no folder can be made at /proc/smalti" in capsys.readouterr().err


def test_a_full_disk_names_the_folders(tmp_path, corpus, capsys, monkeypatch):
    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("smalti.data.prepare.dedup.selftest.plant", full)
    folder, _ = corpus
    places = [f"output={tmp_path / 'out'}", f"work={tmp_path / 'work'}"]
    assert run(["data", "dedup", "demo-dedup", f"documents={folder}", *places]) == 75
    err = capsys.readouterr().err
    assert all(word in err for word in ("disk is full", "work=FOLDER", str(tmp_path / "out"), str(tmp_path / "work")))


@pytest.mark.slow
def test_progress_names_parts(whole):
    assert {call[0] for call in whole[1] if call[3:] == ("part",)} == {
        "boilerplate",
        "candidates",
        "comparing",
        "deciding",
        "writing",
    }


def test_notes_are_printed_once(tmp_path, capsys):
    folder = synthetic_corpus.write_parquet(texts(a="one two three"), tmp_path / "c", files=1)
    held_out = folder / "documents/part-0/heldout.parquet"
    train = folder / "documents/part-0/train.parquet"
    held_out.write_bytes(train.read_bytes())
    pq.write_table(pq.read_table(train).slice(0, 0), train)
    assert run(["data", "dedup", "demo-dedup", f"documents={folder}", f"output={tmp_path / 'out'}"]) == 0
    out = capsys.readouterr().out
    assert out.count("no document has") == 1
    assert "note: part-0: no training document is left" in out


def test_a_dry_run_writes_nothing(tmp_path, corpus, capsys):
    folder, _ = corpus
    assert run(["data", "dedup", "demo-dedup", f"documents={folder}", f"output={tmp_path / 'out'}", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_tokenize_takes_the_output(tmp_path, whole):
    from smalti.config.curate import TokenizeConfig
    from smalti.data.prepare.tokenize import tokenize

    output, _ = whole
    tokenize(TokenizeConfig(documents=str(output), output=str(tmp_path / "tokens"), vocab_size=300))
    assert (tmp_path / "tokens/part-0/train/manifest.json").exists()
    dedup(config_of(output, tmp_path / "again"))
    assert not drops_of(tmp_path / "again")
    assert pq.read_schema(output / "documents/part-0/train.parquet").field("text").type == pa.large_string()
