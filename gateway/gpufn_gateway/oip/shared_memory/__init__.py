"""System shared memory of the Open Inference Protocol: tensors in files that clients on this host register."""
