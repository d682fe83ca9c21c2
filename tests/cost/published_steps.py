"""Published training throughputs of MPT models: the rows that ``smalti/cost/step_time/factors.py`` is fitted on.

LLM Foundry, scripts/train/benchmarking/README.md at commit 061f2c7: H100 80GB BF16 and A100 80GB, MPT models of
scripts/train/yamls/pretrain, amp_bf16 (70B on A100: bf16), full sharding.
"""

from typing import NamedTuple

from smalti.config.load import from_dict
from smalti.config.run import RunConfig


class Published(NamedTuple):
    """One row."""

    gpu: str
    model: str
    seq_len: int
    gpus: int
    rows: int
    """Of a microbatch."""
    recomputes: bool
    tokens_per_s: int
    """On each GPU."""
    mfu_percent: float

    @property
    def config(self) -> RunConfig:
        """The run of one microbatch a step; with more of them a step the update weighs less."""
        tokens = self.rows * self.seq_len
        values = {
            "name": "published",
            "model": {"preset": f"mpt-{self.model}", "max_position_embeddings": 65_536},
            "data": {"sources": {"a": "a"}, "seq_len": self.seq_len, "stages": [{"weights": {"a": 1}}]},
            "train": {
                "duration": "1step",
                "global_batch_tokens": tokens * self.gpus,
                "microbatch_tokens": tokens,
                "optimizer": {"lr": 1e-3},
                "loss": {"chunk_bytes": 2**28},  # what the comparison was first made with; of 4 GiB: docs/log.md
                "parallel": {
                    "ranks": self.gpus,
                    "device": "cuda",
                    "compile": False,
                    "activation_checkpointing": "full" if self.recomputes else "none",
                },
            },
        }
        return from_dict(RunConfig, values).config

    @property
    def step_s(self) -> float:
        """Seconds of one microbatch."""
        return self.rows * self.seq_len / self.tokens_per_s


_H100 = """
70b 2048 64 8 True 1039 42.57
30b 8192 8 1 True 1384 29.92
30b 2048 32 14 True 2308 43.92
30b 2048 8 3 True 2002 38.11
13b 4096 8 10 True 4717 41.6
13b 2048 8 2 False 4792 39.79
13b 1024 8 40 True 5502 44.27
7b 8192 8 8 True 6935 37.14
7b 4096 8 16 True 8611 40.42
7b 2048 8 6 False 10643 46.44
7b 1024 8 64 True 10203 42.83
3b 8192 8 3 False 16578 40.31
3b 4096 8 5 False 20964 42.31
3b 2048 16 10 False 24142 43.73
3b 1024 8 20 False 27046 46.2
3b 512 8 40 False 27965 46.32
1b 8192 8 3 False 29157 37.73
1b 4096 8 7 False 38535 40.26
1b 2048 8 14 False 45455 41.82
1b 1024 8 18 False 48910 41.95
1b 512 8 56 False 52275 43.21
760m 8192 8 6 False 41825 34.84
760m 4096 8 12 False 55459 35.83
760m 2048 8 24 False 63147 34.9
760m 1024 8 48 False 78581 39.76
760m 512 8 96 False 83749 40.42
"""

_A100 = """
70b 2048 64 8 True 410 53.33
30b 2048 8 3 True 916 55.3
13b 8192 8 5 True 1795 56.07
13b 2048 8 2 False 2262 59.57
7b 8192 8 8 True 3206 54.47
7b 2048 8 6 False 4641 64.23
7b 1024 8 64 True 4357 58.01
3b 8192 8 3 False 7695 59.34
3b 2048 8 10 False 10811 62.11
3b 512 8 40 False 12127 63.71
1b 8192 8 3 False 13814 56.69
1b 2048 8 14 False 20513 59.86
1b 512 8 56 False 23148 60.68
760m 8192 8 6 False 20933 55.31
760m 2048 8 24 False 32434 56.85
760m 1024 8 48 False 29765 47.76
350m 8192 8 8 False 36569 53.8
350m 2048 8 32 False 58782 51.62
125m 8192 8 8 False 90392 48.85
125m 2048 8 40 False 142830 44.79
125m 512 8 128 False 165681 42.56
"""


def _rows(gpu: str, table: str) -> list[Published]:
    found = []
    for line in table.split("\n"):
        if line:
            model, seq_len, gpus, rows, recomputes, speed, mfu = line.split()
            found.append(
                Published(gpu, model, int(seq_len), int(gpus), int(rows), recomputes == "True", int(speed), float(mfu))
            )
    return found


ROWS = _rows("h100-sxm", _H100) + _rows("a100-80gb", _A100)
