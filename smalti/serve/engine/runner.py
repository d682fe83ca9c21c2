"""Runs the decoder: prompts piece by piece, and one token for each running request.

Promises: the shapes that a request meets while its prompt is read depend on that request alone. A decode step is padded
to a multiple of ``step_rows`` rows; with 16 the matmuls of torch's CPU build give each row the same bits with 16 rows
and with 32, the default ``max_rows`` (with fewer they do not; tests/serve/test_serve_runner.py looks). So the logits of
a dense model are the same, bit for bit, alone and in any company, on a CPU. Experts get as many tokens as choose them,
and a GPU's kernels change with the shape: there it holds up to rounding.

B: rows. T: tokens fed at once. D: hidden size. V: vocabulary.
"""

from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from smalti.model.blocks.kv_cache import KVCache
from smalti.model.decoder import Decoder
from smalti.serve.engine.scores import Vocabulary, score_hidden
from smalti.serve.engine.sequence import TokenScore
from smalti.serve.engine.slots import Slots


class Runner:
    """The model, the cache of the running requests, and the caches of those whose prompt is being read."""

    def __init__(self, model: Decoder, *, step_rows: int) -> None:
        self._model = model
        self._step_rows = step_rows
        weight = next(model.parameters())
        self._device = weight.device
        # torch's CPU attention is 2 to 3 times slower in bfloat16 than in float32 (docs/concepts/serve/serving.md).
        self._dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
        self._slots = Slots(model.config, self._dtype, self._device)
        self._prompts: dict[int, KVCache] = {}

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes in the cache."""
        config = self._model.config
        return 2 * config.num_hidden_layers * config.kv_heads * config.width_per_head * self._dtype.itemsize

    def read(
        self,
        request: int,
        ids: Rows[int],
        prompt_tokens: int,
        targets: Rows[int],
        n_top: int,
        vocabulary: Vocabulary,
        *,
        most_tokens: int | None = None,
    ) -> tuple[Tensor, list[TokenScore]]:
        """Feed the next tokens of a prompt of ``prompt_tokens``; fp32 logits [V] after the last of them.

        ``targets``: score these tokens, the i-th as what follows the i-th of ``ids``. ``most_tokens``: what prompt and
        answer may come to, for rotary scalings that depend on a length; absent, the prompt. Raises NotFinite.
        """
        if request not in self._prompts:
            self._prompts[request] = KVCache(
                self._model.config,
                1,
                prompt_tokens,
                rope_length_tokens=most_tokens,
                dtype=self._dtype,
                device=self._device,
            )
        scores: list[TokenScore] = []

        def head(hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
            if targets:
                scores.extend(
                    score_hidden(hidden_BTD[0], weight_VD, targets, n_top, vocabulary, logits=self._model.logits)
                )
            return self._last_logits(hidden_BTD, weight_VD)

        ids_BT = torch.tensor([ids], dtype=torch.long, device=self._device)
        with torch.inference_mode():
            logits_BV: Tensor = self._model(ids_BT, cache=self._prompts[request], head=head).value
        return logits_BV[0].float(), scores

    def start(self, request: int) -> None:
        """The prompt has been read: the request takes part in ``decode``."""
        with torch.inference_mode():
            self._slots.join(request, self._prompts.pop(request))

    def free(self, request: int) -> None:
        """Give back what a request holds, wherever it stands."""
        self._prompts.pop(request, None)
        with torch.inference_mode():
            self._slots.leave(request)

    def decode(self, last: dict[int, int]) -> tuple[list[int], Tensor]:
        """Feed each running request its last token; the requests in order, and fp32 logits [B, V] of what follows."""
        with torch.inference_mode():
            self._slots.make_room()
            requests = self._slots.requests()
            ids = [last[request] for request in requests]
            ids += [0] * (-len(ids) % self._step_rows)
            ids_BT = torch.tensor(ids, dtype=torch.long, device=self._device)[:, None]
            logits_BV: Tensor = self._model(ids_BT, cache=self._slots, head=self._last_logits).value
        return requests, logits_BV[: len(requests)].float()

    def _last_logits(self, hidden_BTD: Tensor, weight_VD: Tensor) -> Tensor:
        return self._model.logits(hidden_BTD[:, -1], weight_VD)
