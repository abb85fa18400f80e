"""Closed forms of a configuration's costs (parameters, FLOPs and memory), and the table of GPUs."""
