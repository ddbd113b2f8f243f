"""Runs as other programs load them: transformers' own classes, ONNX, AOTInductor; and the proof that they
compute the same."""
