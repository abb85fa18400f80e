"""Megatron-LM rebuilt on JAX/XLA: one training step, every parallel layout. Start reading at `megajax.train`."""
