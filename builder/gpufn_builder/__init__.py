"""Models in, verified engines out. One builder per node, for the DeviceKinds that the node has.

loop, record    builds from the queue, one at a time per DeviceKind; how far each is
building, store, process  one build: its files fetched, its work in a process of its own, its engine published
pipeline        that work, stage by stage, from the uploaded files to a verified engine
ingest, file_format, normalise, lowering, quantise, transform  the model: looked at, simplified, in less precision
samples, reference, verify, measure  the cases that an engine is checked on, what is right, and how fast it is
compilers/      what makes an engine of it: TensorRT, ONNX Runtime
report, page    what is told of a build, as JSON and to people
"""
