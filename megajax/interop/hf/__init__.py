"""Hugging Face's model formats: one table per family says which of their tensors hold which of our parameters."""
