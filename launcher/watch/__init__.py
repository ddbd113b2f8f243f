"""Watch the ranks of a run: heartbeats, hangs, failures, memory, lines of rank 0."""
