"""Benchmark scaling: choose the runs, execute them, and report figures computed from their records."""
