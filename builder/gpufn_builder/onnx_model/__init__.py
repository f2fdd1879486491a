"""ONNX models: read, check, normalise."""
