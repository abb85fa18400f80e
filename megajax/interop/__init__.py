"""Models, tokenizers and checkpoints of other projects: Hugging Face in both directions, Megatron-LM read."""
