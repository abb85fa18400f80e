"""The virtual profile: a compiled program, priced by instruction and played on the queues of a GPU."""
