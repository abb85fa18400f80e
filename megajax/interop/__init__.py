"""Models of other projects are imported (Hugging Face, Megatron-LM) and exported (Hugging Face)."""
