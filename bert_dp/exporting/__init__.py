"""Export runs for other programs (transformers, ONNX, AOTInductor) and check that they compute the same."""
