"""The training step as a pure function, everything it changes, and what the loop around it needs."""
