"""Export runs for other programs (transformers, ONNX, AOTInductor), and check that the outputs agree."""
