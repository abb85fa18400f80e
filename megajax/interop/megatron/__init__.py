"""Megatron-LM's own checkpoints, read."""
