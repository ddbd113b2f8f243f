"""Benchmark a grid of cells. A cell combines one mode, engine, number of ranks and tensor-parallel size."""
