"""Benchmark scaling over a grid of cells. A cell is a mode, an engine and a number of ranks."""
