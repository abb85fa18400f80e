"""Parameters, FLOPs and memory of a configuration, computed without running it, and the table of GPUs."""
