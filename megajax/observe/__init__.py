"""Everything that a run tells people and tools: log line, metrics files, speed, progress."""
