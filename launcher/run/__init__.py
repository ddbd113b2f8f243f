"""Start and supervise runs, send their records to experiment trackers, and run many short trials."""
