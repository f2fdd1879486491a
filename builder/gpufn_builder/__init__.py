"""The builder: compiles models into verified engines. One builder per node, for the DeviceKinds of the node.

loop, build_record      builds from the queue, and their records
admission, build_slots  the memory of builds, and the admission of more (also memory_history)
build_job, store        one build: fetches the model's files, runs the build process, publishes the engines
processes/              the build process and the candidates' processes, which may crash or hang
pipeline                the work of the build process, stage by stage
onnx_model/, precision/ the model: ingestion, normalization, conversion to lower precision
checks/                 the cases that an engine is checked on, the reference outputs, and the measurement
compilers/              TensorRT and ONNX Runtime
report/                 the report of a build, as JSON and as HTML
"""
