"""Benchmark how training scales: choose the runs, run them, compute figures from their records, show them."""
