"""From text files to token files."""
