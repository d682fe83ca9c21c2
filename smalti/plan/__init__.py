"""Pure arithmetic on configs: parameters, FLOPs, memory, time."""
