"""Benchmark a grid of cells. A cell is one combination of mode, engine and number of ranks."""
