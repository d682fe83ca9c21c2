"""What a step costs, as arithmetic on configs: parameters, FLOPs, memory, time. Knows no torch and measures nothing."""
