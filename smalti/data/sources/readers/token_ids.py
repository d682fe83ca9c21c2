"""Numbers in a file -> token ids: which dtype they get, and that each is one."""

from typing import Any

import numpy as np
import numpy.typing as npt

from smalti.base.errors import DataError

_U32 = 1 << 32


class Ids:
    """Ids of one source; ``dtype`` is what its readers hand out."""

    def __init__(self, stored: "np.dtype[Any]", vocab_size: int | None) -> None:
        """``stored``: an integer dtype of the files."""
        assert stored.kind in "iu", stored
        self.stored = stored
        self.limit = vocab_size or _U32
        self.dtype = np.dtype("<u2" if stored.itemsize <= 2 or self.limit <= 1 << 16 else "<u4")
        held = np.iinfo(stored)
        self._can_be_wrong = held.min < 0 or held.max >= self.limit

    def put(self, values: npt.NDArray[Any], out: npt.NDArray[Any], where: str) -> None:
        """Copy ``values`` into ``out``. Raises DataError for one that is no id."""
        if self._can_be_wrong and values.size:
            low, high = int(values.min()), int(values.max())
            if low < 0 or high >= self.limit:
                raise DataError(
                    f"{where} holds the token id {low if low < 0 else high:,}",
                    allowed=f"0 to {self.limit - 1:,}",
                    hint="is dtype (or vocab_size) of the source right? Else the file is damaged: copy it again",
                )
        out[...] = values
