"""Export models for transformers, ONNX Runtime and AOTInductor, and check that the outputs agree."""
