"""Answers before anything is bought or started: the scaling model and the hardware that it knows."""
