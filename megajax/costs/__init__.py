"""Closed forms of what a configuration costs: parameters, FLOPs and memory, and the GPUs they are held against."""
