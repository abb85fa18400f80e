"""Pipeline parallelism: which stage works on what and when (`schedule`), drawn (`drawing`) and run."""
