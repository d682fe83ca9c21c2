"""What can be read is read in order; what cannot is named with file and line, or dropped and recorded."""

import gzip
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from smalti.base.errors import DataError, UserError
from smalti.data.documents.files import LINKED, NO_FILE, find_files
from smalti.data.documents.readers import RAW_SCHEMA, ReadOptions, read_tasks

RECORDS = [{"id": f"d{i}", "text": f"text {i}\n", "group": f"g{i // 2}"} for i in range(7)]
FIELDS = ReadOptions(id_field="id", group_field="group")


def lines(records=RECORDS) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read(path, options=FIELDS, include=()):
    tasks = read_tasks(find_files(str(path), include).files, options)
    return [row for task in tasks for batch in task.batches() for row in batch.to_pylist()]


def test_jsonl_plain_gz_zst_and_parquet_give_the_same(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines())
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines()))
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    expected = [{**record, "problem": None, "numbers": None, "part": None} for record in RECORDS]
    for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        assert sorted(read(tmp_path / name), key=lambda r: r["id"]) == expected, name


def test_folder_of_text_markdown_and_code(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("no")
    (tmp_path / "b.md").write_text("# B")
    (tmp_path / "sub" / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "z.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "photo.jpeg").write_bytes(b"\xff")
    found = find_files(str(tmp_path))
    assert [file.name for file in found.files] == ["Makefile", "b.md", "sub/a.py", "sub/z.txt.gz"]
    assert found.skipped == {".jpeg": 1}
    rows = read(tmp_path, ReadOptions())
    assert [(row["id"], row["group"], row["text"]) for row in rows][2:] == [
        ("sub/a.py", "sub/a.py", "x = 1\n"),
        ("sub/z.txt.gz", "sub/z.txt.gz", "packed"),
    ]


def test_include_takes_paths_and_names(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("a.py", "b.md", "docs/c.md"):
        (tmp_path / name).write_text("x")
    assert [file.name for file in find_files(str(tmp_path), ["*.md"]).files] == ["b.md", "docs/c.md"]
    assert [file.name for file in find_files(str(tmp_path), ["docs/*"]).files] == ["docs/c.md"]


def test_ids_and_groups_without_fields(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n\n{"text": "y"}\n')
    assert [(row["id"], row["group"]) for row in read(tmp_path, ReadOptions())] == [
        ("a.jsonl:1",) * 2,
        ("a.jsonl:3",) * 2,
    ]


def test_whole_numbers_are_ids(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x", "n": 7}\n')
    assert read(tmp_path, ReadOptions(id_field="n"))[0]["id"] == "7"


BROKEN = [
    (b'{"text": "fine"}\n{"text": "cut off\n', "a.jsonl:2: this line is not valid JSON"),
    (b'{"text": "fine"}\n[1, 2]\n', "a.jsonl:2: this line holds list, not an object"),
    (b'{"text": "fine"}\n{"body": "x", "n": 1}\n', "a.jsonl:2: there is no field 'text'; fields: body, n"),
    (b'{"text": "fine"}\n{"text": null}\n', "a.jsonl:2: field 'text' holds NoneType, not text"),
    (b'{"text": "fine"}\n{"text": "\xff"}\n', "a.jsonl:2: byte 0xff at offset 10 is not UTF-8"),
    (b'{"text": "fine"}\n{"text": "\\ud800"}\n', "a.jsonl:2: field 'text' holds half a surrogate pair"),
    (b'{"text": "fine"}\n' + b'{"text": ' + b"[" * 100_000 + b"\n", "a.jsonl:2: this line is not valid JSON"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_broken_records_are_named_or_dropped(tmp_path, data, message):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(DataError, match="unreadable=drop") as error:
        read(tmp_path, ReadOptions())
    assert message in str(error.value)
    kept, dropped = read(tmp_path, ReadOptions(unreadable="drop"))
    assert (kept["text"], kept["problem"]) == ("fine", None)
    assert message in dropped["problem"]
    assert dropped["text"] == ""


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"fine\nbad \xe4\n", r"t.txt:2: byte 0xe4 at offset 9 is not UTF-8"),
        ("wide".encode("utf-16"), "t.txt:1: this is UTF-16, not UTF-8"),
    ],
)
def test_bad_utf8_in_a_text_file(tmp_path, data, message):
    (tmp_path / "t.txt").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read(tmp_path, ReadOptions())


def test_missing_field_in_parquet_lists_the_fields(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no field 'text'\nallowed: body"):
        read(tmp_path, ReadOptions())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.parquet", b"not parquet", "is not a Parquet file"),
        ("a.jsonl.gz", gzip.compress(lines(), mtime=0)[:-20], "not a complete gzip file"),
        ("a.jsonl.gz", b"plain", "not a complete gzip file"),
        ("a.jsonl.zst", b"plain", "not a complete zstd file"),
        ("a.jsonl.zst", zstandard.compress(lines() * 1000)[:-20], "not a complete zstd file"),
    ],
)
def test_damaged_files(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_bytes_that_no_reader_of_parquet_foresees_are_named_or_dropped(tmp_path):
    offsets = np.array([0, 4, 8, 12], np.int32)
    text = pa.StringArray.from_buffers(3, pa.py_buffer(offsets), pa.py_buffer(b"fine\xff\xfeabfine"))
    pq.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet, row 2: .*can't decode byte 0xff"):
        read(tmp_path, ReadOptions())
    rows = read(tmp_path, ReadOptions(unreadable="drop"))
    assert [row["text"] for row in rows] == ["fine", "", "fine"]
    assert "row 2" in rows[1]["problem"]


def test_a_damaged_page_and_a_repeated_field_of_parquet_are_named(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 1000}), path, use_dictionary=False, compression="none")
    content = bytearray(path.read_bytes())
    content[4:60] = bytes(byte ^ 255 for byte in content[4:60])
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read to its end"):
        read(tmp_path, ReadOptions())
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"]), path)
    with pytest.raises(DataError, match="more than one field 'text'"):
        read(tmp_path, ReadOptions())


def test_a_byte_order_mark_is_no_part_of_jsonl_and_a_bad_id_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}\n')
    assert [row["text"] for row in read(tmp_path, ReadOptions())] == ["a", "b"]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a", "id": "\\ud800"}\n')
    with pytest.raises(DataError, match="field 'id' holds half a surrogate pair"):
        read(tmp_path, ReadOptions(id_field="id"))


def test_what_is_passed_over_is_counted_and_what_cannot_be_listed_or_named_is_refused(tmp_path, monkeypatch):
    source, other = tmp_path / "source", tmp_path / "other"
    for folder in (source, other):
        folder.mkdir()
        (folder / "a.txt").write_text("text")
    (source / "linked").symlink_to(other)
    (source / "loop").symlink_to(source)
    (source / "broken.txt").symlink_to("nowhere")
    os.mkfifo(source / "pipe.txt")
    found = find_files(str(source))
    assert [file.name for file in found.files] == ["a.txt"]
    assert found.skipped == {LINKED: 2, NO_FILE: 2}
    (source / "a.txt").unlink()
    with pytest.raises(DataError, match="not a link to it"):
        find_files(str(source))
    (source / "caf\udce9.txt").write_text("text")
    with pytest.raises(DataError, match=r"caf\\xe9\.txt in .* is not UTF-8"):
        find_files(str(source))

    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="other cannot be read: Permission denied"):
        find_files(str(other))


def test_unknown_kind_missing_path_empty_folder(tmp_path):
    (tmp_path / "a.docx").write_bytes(b"x")
    with pytest.raises(UserError, match=r"a\.docx is of no known kind"):
        find_files(str(tmp_path / "a.docx"))
    with pytest.raises(UserError, match=r"a\.docx is of no known kind"):
        find_files(str(tmp_path), ["*.docx"])
    with pytest.raises(DataError, match="holds no documents"):
        find_files(str(tmp_path))
    with pytest.raises(DataError, match=r"no documents that match \*\.md"):
        find_files(str(tmp_path), ["*.md"])
    with pytest.raises(DataError, match="does not exist"):
        find_files(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="s3://bucket/x"):
        find_files("s3://bucket/x")


def test_tasks_keep_the_order_and_batches_stay_small(tmp_path):
    for i in range(6):
        (tmp_path / f"{i}.txt").write_bytes(b"x" * (6 << 20))
    tasks = read_tasks(find_files(str(tmp_path)).files, ReadOptions())
    assert [[file.name for file in task.files] for task in tasks] == [
        ["0.txt", "1.txt"], ["2.txt", "3.txt"], ["4.txt", "5.txt"]
    ]  # fmt: skip
    batches = list(tasks[0].batches())
    assert [batch.num_rows for batch in batches] == [1, 1]
    assert all(batch.schema == RAW_SCHEMA for batch in batches)
