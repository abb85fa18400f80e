"""Checkpoints of Megatron-LM are imported, in all layouts and of all its ages."""
