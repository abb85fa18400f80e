"""Saving and restoring: asynchronous, atomic, from any mesh to any mesh."""
