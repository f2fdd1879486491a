"""Models of other formats: most become ONNX, in a process of their own (`python -m gpufn.deploy.convert`)."""
