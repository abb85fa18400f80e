"""Tools that start, restart and check runs: see launch/README.md. They run from any folder."""
