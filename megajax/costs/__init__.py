"""Parameters, FLOPs and memory of a configuration, worked out without running it, and the table of GPUs."""
