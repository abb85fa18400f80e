"""What a model costs on which hardware, worked out without running it."""
