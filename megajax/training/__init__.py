"""The training step as a pure function, the state that it changes, and what the training loop needs around it."""
