"""The Open Inference Protocol over gRPC, translated to its HTTP form inside the gateway."""
