"""Files of torch as ONNX: TorchScript (`torch.jit.save`) and exported programs (`torch.export.save`)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from gpufn.deploy.convert.options import ConvertOptions
from gpufn.deploy.convert.packages import required
from gpufn_core.errors import InvalidSpec

_INSTALL = "torch onnx onnxscript"


def exported_program(source: str, onnx: Path, _: ConvertOptions) -> None:
    """Write an exported program. A dimension is dynamic only if the export made it so."""
    torch = required("torch", _INSTALL)
    required("onnxscript", _INSTALL)
    program = torch.export.load(source)
    torch.onnx.export(program, f=str(onnx), dynamo=True, verbose=False)


def script(source: str, onnx: Path, options: ConvertOptions) -> None:
    """Write a TorchScript module. Its first dimensions become dynamic, so that calls can be batched.

    The file does not have the types of its inputs, so an example is needed: samples, or shapes of float32.
    """
    torch = required("torch", _INSTALL)
    required("onnx", _INSTALL)
    try:
        module = torch.jit.load(source, map_location="cpu").eval()
    except RuntimeError as error:
        raise InvalidSpec(
            f"{source} is not a TorchScript file: save the module with torch.jit.save or torch.export.save; a file of "
            "weights alone (state_dict) has no model"
        ) from error
    names = [argument.name for argument in module.forward.schema.arguments[1:]]
    inputs = _examples(torch, options)
    if set(inputs) != set(names):
        raise InvalidSpec(
            f"its inputs are {', '.join(names)}: pass --shape {names[0]}=1x3x224x224 for each (float32), or --samples "
            "FILE.npz with an array for each"
        )
    tensors = tuple(inputs[name] for name in names)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter of scripts is the older one
        outputs = _output_names(_run(module, tensors))
        rows = {name: {0: "rows"} for name, value in inputs.items() if value.dim()} | {
            name: {0: "rows"} for name in outputs
        }
        torch.onnx.export(
            module,
            tensors,
            str(onnx),
            input_names=names,
            output_names=outputs,
            dynamic_axes=rows,
            dynamo=False,
        )


def _examples(torch: Any, options: ConvertOptions) -> dict[str, Any]:
    if options.samples:
        numpy = required("numpy", "numpy")
        with numpy.load(options.samples, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name][0]) for name in arrays.files}
    return {name: torch.ones(shape) for name, shape in options.shapes.items()}


def _run(module: Any, tensors: tuple[Any, ...]) -> Any:
    try:
        return module(*tensors)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]  # the lines before show the interpreter's stack
        raise InvalidSpec(
            f"it does not run with such inputs: {reason}. --shape makes float32; --samples FILE.npz has other types"
        ) from error


def _output_names(outputs: Any) -> list[str]:
    """
    >>> _output_names(1), _output_names((1, 2)), _output_names({"boxes": 1})
    (['output'], ['output_0', 'output_1'], ['boxes'])
    """
    if isinstance(outputs, dict):
        return list(outputs)
    if isinstance(outputs, (list, tuple)):
        return [f"output_{index}" for index in range(len(outputs))]
    return ["output"]
