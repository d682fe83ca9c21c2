"""Attention of one new token for each row, as plain matmuls over the keys and values in a cache.

Why it exists: with one query torch's fused CPU kernel gives other bits depending on the thread that works on a row (its
buffers are aligned for the first thread only), so that an answer would depend on the rows beside it. Plain matmuls give
each row the same bits, whatever the number of rows, of threads and of masked keys behind, where keys come in whole
lines of 16; tests/serve/test_serve_runner.py looks. They are as fast: 4.0 against 3.7 ms on two cores for 16 rows of
704 keys, 12 heads of 64; 4.9 against 4.9 ms for 32 heads on 8 key heads.

Promises: equals ``scaled_dot_product_attention`` up to rounding.

Shapes: B rows, H query heads, K key/value heads, G = H / K query heads per key head, S keys, d width of a head.
"""

from torch import Tensor


def one_token_attention(query_BH1d: Tensor, keys_BKSd: Tensor, values_BKSd: Tensor, mask: Tensor | None) -> Tensor:
    """[B, 1, H, d]; ``mask`` [B, 1, 1, S] is added to the scores."""
    batch, _, _, width = query_BH1d.shape
    query_BKGd = (query_BH1d * width**-0.5).view(batch, keys_BKSd.shape[1], -1, width)
    score_BKGS = query_BKGd @ keys_BKSd.transpose(-2, -1)
    if mask is not None:
        score_BKGS += mask
    return (score_BKGS.softmax(dim=-1) @ values_BKSd).view(batch, 1, -1, width)
