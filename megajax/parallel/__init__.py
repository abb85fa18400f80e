"""The mesh, the one table from logical axes to mesh axes, what is sent between devices, and what is recomputed."""
