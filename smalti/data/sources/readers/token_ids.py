"""Converts the integers of a file to token ids: chooses the dtype and checks the range."""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError

_U32 = 1 << 32


class Ids:
    """The token ids of one source; ``dtype`` is the dtype that its reader returns."""

    def __init__(self, file_dtype: "np.dtype[Any]", vocab_size: int | None) -> None:
        """``file_dtype``: an integer dtype."""
        assert file_dtype.kind in "iu", file_dtype
        self.limit = vocab_size or _U32
        self.dtype = np.dtype("<u2" if file_dtype.itemsize <= 2 or self.limit <= 1 << 16 else "<u4")
        bounds = np.iinfo(file_dtype)
        self._can_be_wrong = bounds.min < 0 or bounds.max >= self.limit

    def put(self, values: npt.NDArray[Any], out: npt.NDArray[Any], where: str) -> None:
        """Copy ``values`` into ``out``. Raises DataError for a value that is not a token id."""
        if self._can_be_wrong and values.size:
            low = int(values.min())
            high = int(values.max())
            if low < 0 or high >= self.limit:
                raise DataError(
                    f"{where} holds the token id {low if low < 0 else high:,}",
                    allowed=f"0 to {self.limit - 1:,}",
                    hint="is dtype (or vocab_size) of the source right? Else the file is damaged: copy it again",
                )
        out[...] = values
