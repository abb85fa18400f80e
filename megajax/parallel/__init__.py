"""The mesh, the one table from logical axes to mesh axes, communication between devices, and recomputation."""
