"""Settings of ONNX Runtime and the CUDA runtime that the builder, workers and local runs share."""
