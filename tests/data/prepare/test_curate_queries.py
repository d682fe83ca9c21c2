"""Daft behind its one module: order, errors as they were raised, and duplicates against brute force."""

import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smalti.base.errors import DataError, UserError
from smalti.data.documents.files import find_files
from smalti.data.documents.readers import RAW_SCHEMA, ReadOptions, read_tasks
from smalti.data.prepare.curate.queries import TRAIN_KEY, first_of_equal, transform

OUT = pa.schema([("id", pa.large_string()), ("n", pa.int64())])


def lengths(batch: pa.RecordBatch) -> pa.RecordBatch:
    sizes = [len(text) for text in batch.column("text").to_pylist()]
    return pa.RecordBatch.from_arrays([batch.column("id"), pa.array(sizes, pa.int64())], schema=OUT)


def tasks_of(folder):
    return read_tasks(find_files(str(folder)).files, ReadOptions())


def test_rows_come_in_the_order_of_files_and_lines(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02d}.jsonl").write_text(
            "".join(f'{{"text": "{"x" * ((i * 7 + j) % 90)}"}}\n' for j in range(50))
        )
    rows = [row for batch in transform(tasks_of(tmp_path), RAW_SCHEMA, lengths, OUT) for row in batch.to_pylist()]
    assert rows == [{"id": f"{i:02d}.jsonl:{j + 1}", "n": (i * 7 + j) % 90} for i in range(40) for j in range(50)]


def test_errors_keep_their_type(tmp_path):
    (tmp_path / "a.jsonl").write_text("broken\n")
    with pytest.raises(DataError, match=r"a\.jsonl:1"):
        list(transform(tasks_of(tmp_path), RAW_SCHEMA, lengths, OUT))
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n')

    def fails(batch):
        raise UserError("no")

    with pytest.raises(UserError, match="no"):
        list(transform(tasks_of(tmp_path), RAW_SCHEMA, fails, OUT))


@pytest.mark.proof
@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans(), st.booleans()), min_size=1, max_size=60), st.data())
def test_first_of_equal_against_brute_force(tmp_path_factory, rows, data):
    """The smallest key of each digest stays; dropped rows take no part; rows may lie in any order in several files."""
    keyed = [
        {"key": i + (0 if heldout else TRAIN_KEY), "digest": digest, "rule": "r" if dropped else None}
        for i, (digest, heldout, dropped) in enumerate(rows)
    ]
    schema = pa.schema([("key", pa.int64()), ("digest", pa.large_string()), ("rule", pa.large_string())])
    folder = tmp_path_factory.mktemp("equal")
    mixed = data.draw(st.permutations(keyed))
    cut = len(mixed) // 2
    for name, part in (("a", mixed[:cut]), ("b", mixed[cut:])):
        pq.write_table(pa.Table.from_pylist(part, schema=schema), folder / f"{name}.parquet")
    found = first_of_equal([str(folder / "a.parquet"), str(folder / "b.parquet")]).to_pylist()
    stays = [row for row in keyed if row["rule"] is None]
    first = {digest: min(r["key"] for r in stays if r["digest"] == digest) for digest in {r["digest"] for r in stays}}
    expected = sorted((r["key"], first[r["digest"]]) for r in stays if r["key"] != first[r["digest"]])
    assert [(row["key"], row["keeper_key"]) for row in found] == expected


@pytest.mark.slow
def test_importing_the_jobs_does_not_import_daft_and_daft_is_quiet():
    code = (
        "import sys, os\n"
        "for name in ('DO_NOT_TRACK', 'DAFT_PROGRESS_BAR'): os.environ.pop(name, None)\n"
        "import smalti.data.prepare.curate.job, smalti.data.prepare.dedup.job\n"
        "assert 'daft' not in sys.modules\n"
        "from smalti.data.prepare.daft_engine import daft_module\n"
        "daft_module()\n"
        "from daft.scarf_telemetry import opted_out\n"
        "assert opted_out() and os.environ['DAFT_PROGRESS_BAR'] == '0'\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""
