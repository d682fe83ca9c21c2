"""The generation engine: requests together against the same ones one after the other, and against transformers.

Random weights, greedy, prompts of unequal length, end tokens ignored, so that every request makes all its tokens.
``--model small`` is a Llama of 3 million parameters, ``125m`` one of the width and depth of GPT-2 small. transformers
(where it is installed) generates the same batch, padded on the left.
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from paired import Ratio, paired
from record import RecordOption, record

from smalti.config.model import ModelConfig
from smalti.model.decoder import Decoder
from smalti.model.dtypes import DTYPES
from smalti.model.init import init_weights
from smalti.serve.engine.engine import Engine
from smalti.serve.engine.offline import generate
from smalti.serve.engine.sampling import SamplingParams
from smalti.serve.engine.scheduler import Limits

SHAPES = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
    "125m": {
        "vocab_size": 50432,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}


class Numbers:
    """A tokenizer of which only the ids matter."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eod_id, self.unused_ids = vocab_size, vocab_size - 1, frozenset[int]()

    def decode_stream(self) -> "Numbers":
        """Itself: no id has a text."""
        return self

    def push(self, token: int) -> str:
        """No text."""
        return ""

    def finish(self) -> str:
        """No text."""
        return ""

    def decode(self, ids: list[int]) -> str:
        """No text."""
        return ""


def prompts_of(rows: int, longest: int) -> list[list[int]]:
    """Prompts of 16 to ``longest`` tokens."""
    return [[7] * (16 + (37 * row) % (longest - 15)) for row in range(rows)]


def transformers_of(config: ModelConfig, dtype: torch.dtype) -> Callable[[list[list[int]], int], object]:
    """Return a function that calls ``generate`` of a Llama of the same shape in transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings")  # fmt: skip
    shape: dict[str, Any] = {name: getattr(config, name) for name in names}
    theirs = LlamaForCausalLM(LlamaConfig(**shape, pad_token_id=0)).to(dtype).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> object:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            return theirs.generate(
                ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
            )

    return generate


def main() -> None:
    """Print tokens a second and the paired ratios; ``--record`` also writes bench/results/engine.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="small", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="fp32", choices=sorted(DTYPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=200, help="longest prompt, in tokens")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--record", action=RecordOption, help="write bench/results/engine.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = ModelConfig.model_validate(SHAPES[options.model])
    model = Decoder(config)
    init_weights(model, config, 1)
    tokenizer: Any = Numbers(config.vocab_size)
    engine = Engine(model.to(DTYPES[options.dtype]), tokenizer)
    lone = Engine(engine.model, tokenizer, limits=Limits(step_rows=1))
    params = SamplingParams(max_tokens=options.new_tokens, ignore_eos=True)
    theirs = None
    if importlib.util.find_spec("transformers"):
        theirs = transformers_of(config, DTYPES[options.dtype])
    figures: dict[str, Any] = {}

    def show(name: str, rows: int, result: Ratio) -> None:
        tokens = rows * options.new_tokens
        speed = {result.slow: tokens / result.slow_s, result.fast: tokens / result.fast_s}
        print(f"rows {rows:3}  {result} |", ", ".join(f"{key} {value:.0f} tokens/s" for key, value in speed.items()))
        key = f"{options.model} {options.dtype} rows {rows}: {name}"
        figures[key] = {**result.figures(), "generated_tokens_per_s": speed}

    for rows in options.rows:
        prompts = prompts_of(rows, options.longest)

        def together(prompts: list[list[int]] = prompts) -> object:
            return generate(engine, prompts, params)

        def one_by_one(prompts: list[list[int]] = prompts) -> object:
            return [generate(lone, [prompt], params) for prompt in prompts]

        names = ("one by one, step_rows=1", "together")
        show("one by one", rows, paired(one_by_one, together, names=names, pairs=options.pairs))
        if theirs is not None:

            def by_transformers(prompts: list[list[int]] = prompts) -> object:
                return theirs(prompts, options.new_tokens)

            names = ("transformers", "together")
            show("transformers", rows, paired(by_transformers, together, names=names, pairs=options.pairs))
    if options.record:
        print("wrote", record("engine", figures))


if __name__ == "__main__":
    main()
