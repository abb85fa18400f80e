"""The virtual profile: a compiled program, priced instruction by instruction and played on the queues of a GPU."""
