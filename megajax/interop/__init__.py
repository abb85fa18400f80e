"""Import of models from other projects (Hugging Face, Megatron-LM), and export (Hugging Face)."""
