"""What the ranks tell while they run, read: heartbeats, hangs, failures, memory, their lines."""
