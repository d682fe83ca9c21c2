"""The floating-point formats that a config may name."""

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def freeze(model: nn.Module, dtype: torch.dtype) -> None:
    """Freeze all parameters in place, in ``dtype``, as training under mixed precision computes with them.

    Parameters of modules with ``full_precision`` (routers) and all buffers keep their dtype.
    """
    for module in model.modules():
        if not getattr(module, "full_precision", False):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.to(dtype), requires_grad=False))
    model.requires_grad_(False)
