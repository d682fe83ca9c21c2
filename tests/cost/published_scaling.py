"""Published throughputs of one model on more and more devices: what ``smalti/cost/layout/predict.py`` is held
against.

LLM Foundry, scripts/train/benchmarking/README.md at commit 8c8dd48 (2025-07): H100 80GB BF16 (Large Scale), H100 80GB
BF16, A100 40GB with 1600 Gbit/s RoCE for each node; sequences of 2,048 tokens, full sharding. Nothing is fitted on
them but for two H100 rows on at most 16 devices, which are among ``published_steps.py`` too.
"""

from published_steps import Published

_ROWS = """
h100-sxm 70b 512 8 True 1007 41.25
h100-sxm 70b 256 8 True 1035 42.42
h100-sxm 70b 128 8 True 1058 43.36
h100-sxm 30b 512 8 True 2115 40.27
h100-sxm 30b 256 8 True 2148 40.89
h100-sxm 30b 128 8 True 2199 41.85
h100-sxm 13b 512 16 True 4952 41.12
h100-sxm 13b 256 16 True 4989 41.42
h100-sxm 13b 128 16 True 5080 42.18
h100-sxm 7b 512 6 False 9670 42.2
h100-sxm 7b 256 6 False 10119 44.15
h100-sxm 7b 128 6 False 10475 45.71
h100-sxm 7b 8 6 False 10643 46.44
h100-sxm 3b 512 8 False 21664 39.24
h100-sxm 3b 256 8 False 22772 41.25
h100-sxm 3b 128 8 False 23422 42.43
h100-sxm 1b 512 12 False 39837 36.65
h100-sxm 1b 256 12 False 42555 39.15
h100-sxm 1b 128 12 False 44123 40.6
h100-sxm 1b 16 20 False 46037 42.36
a100-40gb 70b 128 4 True 376 48.91
a100-40gb 30b 128 6 True 865 52.25
a100-40gb 30b 32 4 True 857 51.74
a100-40gb 13b 128 16 True 1972 51.93
a100-40gb 13b 64 16 True 1976 52.04
a100-40gb 13b 32 14 True 1998 52.62
a100-40gb 7b 128 18 True 3623 50.14
a100-40gb 7b 64 18 True 3665 50.73
a100-40gb 7b 32 18 True 3725 51.55
a100-40gb 7b 8 12 True 3679 50.92
a100-40gb 3b 128 6 False 9538 54.8
a100-40gb 3b 64 6 False 9736 55.94
a100-40gb 3b 32 6 False 9914 56.96
a100-40gb 3b 8 5 False 10065 57.82
a100-40gb 1b 128 10 False 18647 54.41
a100-40gb 1b 64 10 False 19001 55.44
a100-40gb 760m 128 12 False 28940 50.73
a100-40gb 760m 8 12 False 30173 52.89
a100-40gb 350m 128 18 False 51934 45.61
a100-40gb 350m 8 16 False 55995 49.17
a100-40gb 125m 128 26 False 123936 38.86
a100-40gb 125m 8 26 False 136334 42.75
"""


def _row(line: str) -> Published:
    gpu, model, gpus, rows, recomputes, tokens_per_s, mfu = line.split()
    return Published(
        gpu, model, 2048, int(gpus), int(rows), recomputes == "True", int(tokens_per_s), float(mfu)
    )  # fmt: skip


ROWS = tuple(_row(line) for line in _ROWS.strip().splitlines())
"""Left out: rows whose text says that something was amiss (1B on 32 A100: 45 % between 56 % and 55 %), and those whose
microbatch was bounded by memory at 1 to 2 rows."""
