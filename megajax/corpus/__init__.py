"""Preparation of text files: reading them, tokenizing them, and writing token files."""
