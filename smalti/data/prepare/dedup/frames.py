"""The basis of the Daft queries of a deduplication: tasks as rows, functions of columns, Parquet input and output.

Functions run in threads. Errors of workers are raised in the driver (``daft_engine``).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from smalti.config.dedup import DedupConfig
from smalti.data.prepare.daft_engine import Failures, choose_runner, daft_module

_MORSEL_ROWS = 4096


@dataclass(frozen=True)
class Frames:
    """Builds Daft frames with one config; ``failures`` records the errors of workers."""

    config: DedupConfig
    failures: Failures

    def __post_init__(self) -> None:
        choose_runner(self.config.runner, self.config.ray_address, "near-duplicate removal")

    @property
    def version(self) -> str:
        """Version of Daft, whose hashes are in the results of the stages."""
        return f"daft {daft_module().__version__}"

    def _tasks(self, table: pa.Table) -> Any:
        daft = daft_module()
        frame = daft.from_arrow(table)
        # The native runner has no partitions and would warn; its functions take tasks one by one (batch_size=1).
        return frame.into_partitions(min(table.num_rows, 64)) if self.config.runner == "ray" else frame

    def _function(self, function: Callable[..., pa.Array], to: pa.DataType, batch_size: int | None = None) -> Any:
        """Wrap ``function`` as a Daft function of columns, run in threads: child processes would copy the rows."""
        daft = daft_module()
        options = {"return_dtype": daft.DataType.from_arrow_type(to), "use_process": False, "batch_size": batch_size}
        return daft.func.batch(**options)(self.failures.recording(function))

    def _read(self, folder: Path, files: str = "*.parquet") -> Any:
        # The folder's name may contain wildcards.
        return daft_module().read_parquet(re.sub(r"([\\\[\]*?{}])", r"\\\1", str(folder)) + f"/{files}")

    def _write(self, frame: Any, folder: Path) -> None:
        # Small morsels: a row of pairs carries two sets of shingles, and those of books are large.
        # One task for many small files: on a cluster the cost of a shuffle is their number squared.
        options = {"default_morsel_size": _MORSEL_ROWS, "enable_scan_task_split_and_merge": True}
        with self.failures.raised(), daft_module().execution_config_ctx(**options):
            frame.write_parquet(str(folder), compression="zstd", write_mode="append")


def exploded(frame: Any) -> Any:
    """Explode the only column, which holds lists, into a row for each value."""
    daft = daft_module()
    (name,) = frame.column_names
    return frame.explode(daft.col(name)).where(daft.functions.not_null(daft.col(name)))


def n_rows_of(folder: Path) -> int:
    """Return the number of rows in the Parquet files of ``folder``."""
    return sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))
