"""Runs: their processes, their records, and many short ones."""
