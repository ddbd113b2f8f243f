"""Measure computation, communication and storage. Each module prints JSON lines for the launcher."""
