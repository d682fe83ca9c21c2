"""Sequences of examples that are not in memory: kept in a temporary file, or computed when they are read."""

import os
import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from smalti.data.examples import Example

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Indexed(Protocol[T_co]):
    """A length, and values by their number; a list is one."""

    def __len__(self) -> int:
        """Return the number of values."""

    def __getitem__(self, number: int, /) -> T_co:
        """Return a value."""

    def __iter__(self) -> Iterator[T_co]:
        """Yield all values."""


class Computed(Generic[T]):
    """Values that a function of their number returns, each time they are read."""

    def __init__(self, count: int, value: Callable[[int], T]) -> None:
        self._count = count
        self._value = value

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int, /) -> T:
        return self._value(range(self._count)[number])

    def __iter__(self) -> Iterator[T]:
        return map(self._value, range(self._count))


class Spool(Computed[Example]):
    """Examples in a file without a name in ``folder``, which ``close`` removes; 8 bytes of memory for each."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0, self._read)
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, until close()
        self._ends = array("q", [0])

    def append(self, example: Example) -> None:
        """Write an example behind the others."""
        data = pickle.dumps(example, protocol=pickle.HIGHEST_PROTOCOL)
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))
        self._count += 1

    def close(self) -> None:
        """Remove the file."""
        self._file.close()

    def _read(self, number: int) -> Example:
        self._file.flush()
        begin, end = self._ends[number : number + 2]
        example: Example = pickle.loads(os.pread(self._file.fileno(), end - begin, begin))
        return example
