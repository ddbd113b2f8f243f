"""Finetuned runs of a pretrained one, and what they score."""

FILE = "glue.json"
