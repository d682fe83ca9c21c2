"""A folder that holds no tokenizer is answered by the key that named it."""

from pathlib import Path

import pytest

from smalti.base.errors import DataError
from smalti.data.tokenizer.digest import check_folder


def test_a_folder_without_a_tokenizer_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer = .*nosuch: there is no tokenizer\.json") as caught:
        check_folder(tmp_path / "nosuch", "0" * 64)
    assert caught.value.allowed
    assert "data.tokenizer=" in str(caught.value.hint)
