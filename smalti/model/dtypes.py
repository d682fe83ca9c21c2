"""The floating-point formats that a config may name."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
