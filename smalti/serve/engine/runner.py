"""Runs the decoder: prompts in chunks, and one token for each running request.

Batch-invariant to the bit for a dense model on a CPU: a prompt is prefilled by itself, and a decode step is padded to a
multiple of ``step_rows`` rows. For experts, whose rows depend on the tokens' choices (by default without padding), and
on a GPU, whose kernels depend on the shape, it is batch-invariant up to rounding; so are the rows of adapters.

B: rows. T: tokens fed at once. D: hidden size. V: vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from smalti.model.adapters.several import NONE, AdapterRows
from smalti.model.blocks.kv_cache import KVCache
from smalti.model.decoder import Decoder
from smalti.serve.engine.cache import BatchedKVCache
from smalti.serve.engine.request import TokenScore
from smalti.serve.engine.scores import SampledIds, score_hidden


class Runner:
    """The model, the batched cache of the running requests, and a cache for each prompt that is being prefilled.

    With ``step_rows`` 16, the matrix products of torch's CPU build give each row the same bits with 16 rows and with
    32, the default ``max_rows``; with fewer they do not (tests/serve/test_serve_runner.py).
    """

    def __init__(
        self, model: Decoder, sampled_ids: SampledIds, *, step_rows: int, adapter_rows: AdapterRows | None = None
    ) -> None:
        self._model = model
        self._adapter_rows = adapter_rows
        self._adapter_of: dict[int, int] = {}
        self._sampled_ids = sampled_ids
        self._step_rows = step_rows
        weight = next(model.parameters())
        self._device = weight.device
        # torch's CPU attention is 2 to 3 times slower in bfloat16 than in float32 (docs/concepts/serve/serving.md).
        self._dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
        self._cache = BatchedKVCache(model.config, self._dtype, self._device)
        self._prompts: dict[int, KVCache] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        config = self._model.config
        return 2 * config.num_hidden_layers * config.kv_heads * config.width_per_head * self._dtype.itemsize

    def prefill(
        self,
        request_id: int,
        ids: Sequence[int],
        prompt_tokens: int,
        *,
        targets: Sequence[int] = (),
        n_top: int = 0,
        max_cached_tokens: int | None = None,
        adapter: int = NONE,
    ) -> tuple[Tensor, list[TokenScore]]:
        """Feed the next ``ids`` of a prompt of ``prompt_tokens``; returns fp32 logits [V] after the last of them.

        ``targets``: score these tokens, the i-th as the successor of the i-th of ``ids``, each with the ``n_top``
        likeliest. ``max_cached_tokens``: the longest that prompt and answer may become, for rotary scalings that depend
        on a length; default ``prompt_tokens``. ``adapter``: its number, for this request. Raises NotFinite.
        """
        if request_id not in self._prompts:
            self._prompts[request_id] = KVCache(
                self._model.config,
                1,
                prompt_tokens,
                rope_length_tokens=max_cached_tokens,
                dtype=self._dtype,
                device=self._device,
            )
        self._adapter_of[request_id] = adapter
        self._set_adapters([adapter])
        scores: list[TokenScore] = []

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            if targets:
                scores.extend(
                    score_hidden(hidden_BTD[0], weight_VD, targets, n_top, self._sampled_ids, logits=self._model.logits)
                )
            return self._last_logits(hidden_BTD, weight_VD)

        ids_BT = torch.tensor([ids], dtype=torch.long, device=self._device)
        with torch.inference_mode():
            logits_BV: Tensor = self._model(ids_BT, cache=self._prompts[request_id], head=head).value
        return logits_BV[0].float(), scores

    def start(self, request_id: int) -> None:
        """Move a prefilled request into the decode batch."""
        with torch.inference_mode():
            self._cache.add(request_id, self._prompts.pop(request_id))

    def free(self, request_id: int) -> None:
        """Release the cache of a request, prefilled or running."""
        self._prompts.pop(request_id, None)
        self._adapter_of.pop(request_id, None)
        with torch.inference_mode():
            self._cache.remove(request_id)

    def decode(self, last_ids: dict[int, int]) -> tuple[list[int], Tensor]:
        """Feed each running request its last token; returns their ids in order and their fp32 logits [B, V]."""
        with torch.inference_mode():
            self._cache.grow()
            request_ids = self._cache.requests()
            ids = [last_ids[request_id] for request_id in request_ids]
            ids += [0] * (-len(ids) % self._step_rows)
            adapters = [self._adapter_of[request_id] for request_id in request_ids]
            self._set_adapters(adapters + [NONE] * (len(ids) - len(adapters)))
            ids_BT = torch.tensor(ids, dtype=torch.long, device=self._device)[:, None]
            logits_BV: Tensor = self._model(ids_BT, cache=self._cache, head=self._last_logits).value
        return request_ids, logits_BV[: len(request_ids)].float()

    def _set_adapters(self, adapters: list[int]) -> None:
        if self._adapter_rows is not None:
            self._adapter_rows.set(adapters, self._device)

    def _last_logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return self._model.logits(hidden_BTD[:, -1], weight_VD)
