"""Measure one rank, or communication between ranks; each program prints JSON lines for the launcher."""
