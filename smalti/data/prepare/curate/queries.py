"""The Daft queries of a curation: apply a function to the documents, and find exact duplicates.

Results are in the order of the tasks and their rows; a ``SmaltiError`` is raised unchanged. Uses ``daft.functions``,
``@daft.func.batch`` and ``DataSource`` only (the older ``udf`` and namespaces are removed in 0.8). Runs on Daft's local
runner, unless the process has chosen another.
"""

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from smalti.data.documents.readers import ReadTask
from smalti.data.prepare.daft_engine import daft_module

BatchFunction = Callable[[pa.RecordBatch], pa.RecordBatch]

TRAIN_KEY = 1 << 62
"""First key of training documents; held-out ones begin at 0. Of equal texts the smallest key is kept."""

_TASK = "__task"
_END = "__end"
_FAILED = -1


def transform(
    tasks: Sequence[ReadTask], schema: pa.Schema, function: BatchFunction, out_schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Read ``tasks``, apply ``function``, and yield batches of ``out_schema``.

    ``function`` gets batches of ``schema``, which has text columns only. It must return a row
    for each row and accept empty text. Daft chooses the size of batches.
    """
    daft = daft_module("curating documents")
    failures: dict[int, Exception] = {}
    names = schema.names

    def apply(*columns: Any) -> pa.StructArray:
        arrays = [_as(column.to_arrow(), type_) for column, type_ in zip(columns, schema.types, strict=True)]
        batch = function(pa.RecordBatch.from_arrays(arrays, schema=schema))
        assert batch.num_rows == len(arrays[0])
        return pa.StructArray.from_arrays(batch.columns, fields=list(out_schema))

    # No more threads (the functions are Python and would wait for one another) and no child process (it would lose the
    # type of an error).
    row_type = daft.DataType.from_arrow_type(pa.struct(list(out_schema)))
    batch_function = daft.func.batch(return_dtype=row_type, use_process=False)(apply)
    frame = _read(daft, tasks, schema, failures)
    frame = frame.select(batch_function(*map(daft.col, names)).alias("row"), daft.col(_TASK), daft.col(_END))
    frame = frame.select(daft.functions.unnest(daft.col("row")), daft.col(_TASK), daft.col(_END))
    completeness = _Completeness(len(tasks), failures)
    for batch in frame.to_arrow_iter():
        rows = completeness.take(batch)
        if rows.num_rows:
            columns = [_as(rows.column(field.name), field.type) for field in out_schema]
            yield pa.RecordBatch.from_arrays(columns, schema=out_schema)
    completeness.check()


class _Completeness:
    """Asserts that every task arrives with all of its rows.

    In Daft 0.7.26 an error inside a source is a race: either it is raised, or the stream ends as if there were no more
    rows. So errors are passed as rows, each task ends with a row that counts its rows, and a short stream is an error.
    """

    def __init__(self, n_tasks: int, failures: dict[int, Exception]) -> None:
        self._failures = failures
        self._counts = [0] * n_tasks
        self._open = set(range(n_tasks))

    def take(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows of ``batch`` that are not marks; raises the error of a task."""
        marks = batch.column(_END).to_pylist()
        for task, end in zip(batch.column(_TASK).to_pylist(), marks, strict=True):
            if end is None:
                self._counts[task] += 1
            elif end == _FAILED:
                raise self._failures[task]
            else:
                assert self._counts[task] == end, f"task {task} has {end} rows, {self._counts[task]} arrived"
                self._open.remove(task)
        if all(end is None for end in marks):
            return batch
        return batch.filter(pa.array([end is None for end in marks]))

    def check(self) -> None:
        """Assert at the end of the stream that all tasks have ended."""
        assert not self._open, f"the stream of documents ended early: {len(self._open)} tasks are not complete"


def first_of_equal(paths: Sequence[str]) -> pa.Table:
    """Find exact duplicates: a table of key and keeper_key (int64), sorted by key.

    ``paths`` are Parquet files with the columns key (int64), digest (text) and rule; rows with a rule are ignored: they
    are dropped already. Of equal digests the smallest key is kept and not listed.
    """
    daft = daft_module("curating documents")
    col = daft.col
    rows = daft.read_parquet(list(paths)).where(col("rule").is_null()).select("key", "digest")
    # A window and no join: Daft 0.7.26 plans an equality join on a binary column as a cross join of all rows with all
    # keepers (which never ended when both sides shared a name). Digests are text for the same reason.
    same = daft.Window().partition_by("digest")
    equal = rows.with_column("keeper_key", col("key").min().over(same)).where(col("key") != col("keeper_key"))
    return equal.select("key", "keeper_key").sort("key").to_arrow()


def _as(array: Any, to: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array if array.type == to else array.cast(to)


def _read(daft: Any, tasks: Sequence[ReadTask], schema: pa.Schema, failures: dict[int, Exception]) -> Any:
    """Return a frame over ``tasks`` with two more columns: task number, and in the last row of a task its row count."""
    from daft.io.source import DataSource, DataSourceTask
    from daft.recordbatch import RecordBatch

    marked = pa.schema([*schema, (_TASK, pa.int64()), (_END, pa.int64())])
    daft_schema = daft.Schema.from_pyarrow_schema(marked)

    def mark(batch: pa.RecordBatch, number: int, end: int | None) -> Any:
        extra = [pa.array([value] * batch.num_rows, pa.int64()) for value in (number, end)]
        whole = pa.RecordBatch.from_arrays([*batch.columns, *extra], schema=marked)
        return RecordBatch.from_arrow_record_batches([whole], marked)

    class _Task(DataSourceTask):
        def __init__(self, number: int, task: ReadTask) -> None:
            self.number = number
            self.task = task

        @property
        def schema(self) -> Any:
            return daft_schema

        async def read(self) -> AsyncIterator[Any]:
            n_rows = 0
            try:
                for batch in self.task.batches():
                    n_rows += batch.num_rows
                    yield mark(batch, self.number, None)
            except Exception as error:
                failures[self.number] = error
                n_rows = _FAILED
            blank = [pa.array([""], type_) for type_ in schema.types]
            yield mark(pa.RecordBatch.from_arrays(blank, schema=schema), self.number, n_rows)

    class _Source(DataSource):
        @property
        def name(self) -> str:
            return "smalti documents"

        @property
        def schema(self) -> Any:
            return daft_schema

        async def get_tasks(self, pushdowns: Any) -> AsyncIterator[Any]:
            for number, task in enumerate(tasks):
                yield _Task(number, task)

    return _Source().read()
