"""`python -m gpufn.deploy.torch_export FILE FACTORY ONNX`: writes the torch module that a user's factory makes as ONNX.

A process of its own: neither the CLI nor the builder ever imports torch, or a user's file that builds a model. What
goes wrong is told in the last line of standard error, and by exit code 1.
"""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpufn.declare.function import Function, FunctionClass
from gpufn.deploy import bundle
from gpufn_core.errors import GpufnError, InvalidSpec


def main(file: str, factory: str, onnx: str) -> None:
    project = bundle.load(Path(file))
    make = getattr(project.module, factory, None)
    if not callable(make):
        raise InvalidSpec(f"{file} has no function {factory}")
    if isinstance(make, (Function, FunctionClass)):
        deploys = f"`gpufn deploy {file} --name {make.name}` deploys it"
        raise InvalidSpec(f"{factory} makes no model, it is a @gpu_function: {deploys}")
    try:
        import torch  # noqa: PLC0415
    except ImportError as error:
        raise InvalidSpec("torch is not installed here: pip install torch onnx onnxscript") from error
    try:
        network, inputs = made_by(make(), torch.nn.Module)
        export(torch, network, inputs, Path(onnx))
    except GpufnError:
        raise
    except Exception as error:
        raise InvalidSpec(bundle.where_it_failed(first_cause(error), Path(file).resolve(), project.root)) from error


def made_by(made: Any, kind: type) -> tuple[Any, tuple[Any, ...] | dict[str, Any]]:
    """The module and its example inputs, positional or by name: what the factory may return, in one form."""
    network, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(network, kind):
        raise InvalidSpec(
            f"the factory returns a torch module, or (module, example_inputs), not {type(network).__name__}"
        )
    if inputs is None:
        inputs = getattr(network, "example_inputs", None)
    if inputs is None:
        raise InvalidSpec("give example inputs: return (module, example_inputs), or set module.example_inputs")
    if isinstance(inputs, Mapping):
        return network, dict(inputs)
    return network, tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)


def check_tensors(named: Mapping[str, Any], kind: type) -> None:
    for name, value in named.items():
        if not isinstance(value, kind):
            raise InvalidSpec(
                f"the example input {name} is no tensor but {type(value).__name__}: make it a constant of the module"
            )


def first_cause(error: BaseException) -> BaseException:
    """torch wraps what went wrong in errors of its own, which say where to ask for help."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def export(torch: Any, network: Any, inputs: tuple[Any, ...] | dict[str, Any], onnx: Path) -> None:
    """With the first dimension of every input dynamic, so that calls can share a run; inputs keep their names.

    torch specialises a size of 0 or 1 in the examples, so one row becomes two.
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


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except GpufnError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        sys.exit(error.message)
