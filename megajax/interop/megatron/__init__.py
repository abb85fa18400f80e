"""Import of Megatron-LM's checkpoints, in all layouts and from all of its versions."""
