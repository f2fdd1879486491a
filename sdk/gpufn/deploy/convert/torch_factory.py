"""The torch module of a user's factory as ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpufn.declare.function import Function, FunctionClass
from gpufn.deploy import bundle
from gpufn.deploy.convert.packages import required
from gpufn_core.errors import GpufnError, InvalidSpec


def convert(file: str, factory: str, onnx: Path) -> None:
    project = bundle.load(Path(file))
    function = getattr(project.module, factory, None)
    if not callable(function):
        raise InvalidSpec(f"{file} has no function {factory}")
    if isinstance(function, (Function, FunctionClass)):
        command = f"gpufn deploy {file} --name {function.name}"
        raise InvalidSpec(f"{factory} is a @gpu_function, not a model factory: deploy it with `{command}`")
    torch = required("torch", "torch onnx onnxscript")
    try:
        network, inputs = module_and_inputs(function(), torch.nn.Module)
        export(torch, network, inputs, onnx)
    except GpufnError:
        raise
    except Exception as error:
        raise InvalidSpec(bundle.describe_failure(root_cause(error), Path(file).resolve(), project.root)) from error


def module_and_inputs(result: Any, kind: type) -> tuple[Any, tuple[Any, ...] | dict[str, Any]]:
    """Return the module and its example inputs, positional or by name, from the factory's return value."""
    network, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(network, kind):
        raise InvalidSpec(
            f"the factory must return a torch module or (module, example_inputs), not {type(network).__name__}"
        )
    if inputs is None:
        inputs = getattr(network, "example_inputs", None)
    if inputs is None:
        raise InvalidSpec("there are no example inputs: return (module, example_inputs) or set module.example_inputs")
    if isinstance(inputs, Mapping):
        return network, dict(inputs)
    return network, tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)


def check_tensors(inputs: Mapping[str, Any], kind: type) -> None:
    for name, value in inputs.items():
        if not isinstance(value, kind):
            raise InvalidSpec(
                f"the example input {name} is not a tensor but {type(value).__name__}: make it a constant of the module"
            )


def root_cause(error: BaseException) -> BaseException:
    """Return the original error, which torch wraps in its own errors with links to its help."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def export(torch: Any, network: Any, inputs: tuple[Any, ...] | dict[str, Any], onnx: Path) -> None:
    """Write the ONNX file. Inputs keep their names, and their first dimension is dynamic, so that calls can be batched.

    torch specializes sizes 0 and 1 of the example inputs, so one row is doubled.
    """
    network.eval()
    rows = torch.export.Dim("rows", min=1, max=65_536)
    names = list(inspect.signature(network.forward).parameters)
    named = inputs if isinstance(inputs, dict) else dict(zip(names, inputs, strict=False))
    check_tensors(named, torch.Tensor)
    doubled = {
        name: torch.cat([value, value]) if value.dim() and value.shape[0] == 1 else value
        for name, value in named.items()
    }
    dynamic = {name: {0: rows} if value.dim() else None for name, value in doubled.items()}
    with torch.no_grad():
        torch.onnx.export(
            network,
            (),
            str(onnx),
            kwargs=doubled,
            input_names=list(doubled),
            dynamic_shapes=dynamic,
            dynamo=True,
            verbose=False,
        )
