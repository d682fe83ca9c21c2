"""The cost of a step, as arithmetic on configs: parameters, FLOPs, memory, time. Does not import torch."""
