"""The way of text files to token files."""
