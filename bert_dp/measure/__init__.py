"""Measure computation, communication and storage. Each program prints JSON lines for the launcher."""
