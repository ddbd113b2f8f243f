"""Monitor the ranks of a run: heartbeats, hangs, failures, memory, output of rank 0."""
