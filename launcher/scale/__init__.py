"""The scaling benchmark: which runs, running them, figures from their records, and what a reader sees."""
