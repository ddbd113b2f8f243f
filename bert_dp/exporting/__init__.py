"""Export models for transformers, ONNX Runtime and AOTInductor, and compare their outputs with the run's."""
