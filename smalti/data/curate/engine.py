"""The only module that knows Daft. Others hand it read tasks, plain functions on record batches, and Parquet files.

Promises: results in the order of the tasks and their rows; errors of ours come out as they were raised. Uses only
``daft.functions``, ``@daft.func.batch`` and ``DataSource`` (the older ``udf`` and namespaces go away in 0.8); a new
version of Daft is tried here first. Runs on Daft's local runner unless the user has chosen another for the process.
"""

import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from smalti.base.errors import SmaltiError, missing_extra
from smalti.data.curate.readers import ReadTask

BatchFunction = Callable[[pa.RecordBatch], pa.RecordBatch]

TRAIN_KEY = 1 << 62
"""Keys of training documents begin here, those of held-out ones at 0: of equal texts the smallest key stays."""


def _daft() -> Any:
    # Daft reads these when it is imported: it would report its use to its makers, draw progress bars of its own, and
    # print a query id to a terminal. What the user has set stays.
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    os.environ.setdefault("DAFT_SHOW_QUERY_ID", "0")
    try:
        import daft
    except ImportError as error:
        raise missing_extra("daft", "data", "curating documents") from error
    return daft


def transform(
    tasks: Sequence[ReadTask], schema: pa.Schema, function: BatchFunction, out_schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Read ``tasks`` (batches of ``schema``), apply ``function`` to every batch, hand out batches of ``out_schema``.

    ``function`` must give one row for each row. Batches come out in order; their size is Daft's choice, so nothing may
    depend on it.
    """
    daft = _daft()
    failures: list[SmaltiError] = []
    names = schema.names

    def apply(*columns: Any) -> pa.StructArray:
        arrays = [column.to_arrow() for column in columns]
        batch = pa.RecordBatch.from_arrays(
            [_as(a, t) for a, t in zip(arrays, schema.types, strict=True)], schema=schema
        )
        done = function(batch)
        assert done.num_rows == batch.num_rows
        return pa.StructArray.from_arrays(done.columns, fields=list(out_schema))

    # Threads would only wait for one another (the functions are Python), and a child process would lose our errors.
    row_type = daft.DataType.from_arrow_type(pa.struct(list(out_schema)))
    batch_function = daft.func.batch(return_dtype=row_type, use_process=False)(apply)
    frame = _read(daft, tasks, schema, failures)
    frame = frame.select(batch_function(*(daft.col(name) for name in names)).alias("row"))
    frame = frame.select(daft.functions.unnest(daft.col("row")))
    try:
        for batch in frame.to_arrow_iter():
            yield pa.RecordBatch.from_arrays(
                [_as(batch.column(field.name), field.type) for field in out_schema], schema=out_schema
            )
    except daft.exceptions.DaftCoreException as error:
        # An error inside a source comes back as text only; the source has kept the original.
        if failures:
            raise failures[0] from error
        raise


def first_of_equal(paths: Sequence[str]) -> pa.Table:
    """Exact duplicates among documents: columns key, keeper_key (int64), sorted by key.

    ``paths`` are Parquet files with the columns key (int64), digest (text), rule; rows with a rule are dropped already
    and take no part. Of equal digests the smallest key stays and is not listed.
    """
    daft = _daft()
    col = daft.col
    rows = daft.read_parquet(list(paths)).where(col("rule").is_null()).select("key", "digest")
    # A window and no join: Daft 0.7.26 plans an equality join on a binary column as a cross join, so that every row
    # met every keeper (and never came back when both sides shared a name). Digests are text for the same reason.
    same = daft.Window().partition_by("digest")
    equal = rows.with_column("keeper_key", col("key").min().over(same)).where(col("key") != col("keeper_key"))
    return equal.select("key", "keeper_key").sort("key").to_arrow()


def _as(array: Any, to: pa.DataType) -> pa.Array:
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    return array if array.type == to else array.cast(to)


def _read(daft: Any, tasks: Sequence[ReadTask], schema: pa.Schema, failures: list[SmaltiError]) -> Any:
    """A frame over ``tasks``; each is read when its turn comes, batch by batch."""
    from daft.io.source import DataSource, DataSourceTask
    from daft.recordbatch import RecordBatch

    daft_schema = daft.Schema.from_pyarrow_schema(schema)

    class _Task(DataSourceTask):
        def __init__(self, task: ReadTask) -> None:
            self.task = task

        @property
        def schema(self) -> Any:
            return daft_schema

        async def read(self) -> AsyncIterator[Any]:
            try:
                for batch in self.task.batches():
                    yield RecordBatch.from_arrow_record_batches([batch], schema)
            except SmaltiError as error:
                failures.append(error)
                raise

    class _Source(DataSource):
        @property
        def name(self) -> str:
            return "smalti documents"

        @property
        def schema(self) -> Any:
            return daft_schema

        async def get_tasks(self, pushdowns: Any) -> AsyncIterator[Any]:
            for task in tasks:
                yield _Task(task)

    return _Source().read()
