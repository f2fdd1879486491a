"""Models of other formats: most become ONNX, in their own process (`python -m gpufn.deploy.convert`)."""
