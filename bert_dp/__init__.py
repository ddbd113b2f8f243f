"""One rank of a bert-dp run."""

__version__ = "0.1.0"
