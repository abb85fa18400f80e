"""Hugging Face models are imported and exported; a family is the rows of its config.json and a table of its tensors."""
