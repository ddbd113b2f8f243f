"""Start and supervise runs, send their records to services, and run many short trials."""
