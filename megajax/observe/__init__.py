"""Reports of a run to people and tools: log line, metrics files, speed, progress."""
