"""Import and export of Hugging Face models; a family is the rows of its config.json and a table of its tensors."""
