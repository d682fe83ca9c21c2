"""A shard that is read once: every block gets its values, and the digest is that of the whole file."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from smalti.base.hashing import xxh3_file
from smalti.distributed.checkpoint import shard_file
from smalti.distributed.checkpoint.shard_file import Block, Place, ShardFile

HEADER = b"h" * 24


def _write(path: Path, tensors: list[torch.Tensor]) -> list[Place]:
    """Write the parts one after another behind a header; return where they are."""
    data, places = HEADER, []
    for tensor in tensors:
        places.append(Place(path.name, len(data), tuple(tensor.shape), tensor.dtype))
        data += bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    path.write_bytes(data)
    return places


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_random_blocks_get_their_values(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("shard") / "00000.safetensors"
    shapes = st.lists(st.integers(1, 6), min_size=0, max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
    tensors = [
        torch.arange(100.0, 100 + torch.Size(shape).numel()).to(data.draw(dtypes)).view(shape)
        for shape in data.draw(st.lists(shapes, min_size=1, max_size=4))
    ]
    places = _write(path, tensors)
    digests = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "CHUNK_BYTES", data.draw(st.sampled_from([8, 24, 1 << 18])))
        with ShardFile(path, digests=digests) as file:
            for tensor, place in zip(tensors, places, strict=True):
                blocks, expected = [], []
                for _ in range(data.draw(st.integers(0, 2))):
                    begins = [data.draw(st.integers(0, size - 1)) for size in tensor.shape]
                    ends = [data.draw(st.integers(a + 1, size)) for a, size in zip(begins, tensor.shape, strict=True)]
                    expected.append(tensor[tuple(map(slice, begins, ends))])
                    target = torch.full(
                        expected[-1].shape, -1, dtype=data.draw(st.sampled_from([tensor.dtype, torch.float64]))
                    )
                    blocks.append(Block(tuple(begins), target))
                file.fill(place, blocks)
                for block, values in zip(blocks, expected, strict=True):
                    assert torch.equal(block.target, values.to(block.target.dtype))
            if digests:
                assert file.finish() == xxh3_file(path)


def test_a_target_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    (place,) = _write(tmp_path / "s", [tensor])
    target = torch.zeros(4, 3).t()
    with ShardFile(tmp_path / "s", digests=True) as file:
        file.fill(place, [Block((0, 0), target)])
        assert file.finish() == xxh3_file(tmp_path / "s")
    assert torch.equal(target, tensor)


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    (place,) = _write(tmp_path / "s", [torch.ones(8)])
    (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:-1])
    with (
        ShardFile(tmp_path / "s", digests=False) as file,
        pytest.raises(EOFError, match="shards/s ends after 55 bytes"),
    ):
        file.fill(place, [Block((0,), torch.zeros(8))])
