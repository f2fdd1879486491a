"""ONNX models: reading, validation, normalization."""
