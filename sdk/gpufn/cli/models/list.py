"""`gpufn models`, `gpufn models describe`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from gpufn.cli.terminal.command import Argument, Group, connect, json_option
from gpufn.cli.terminal.output import duration, print_fields, print_json, print_table

if TYPE_CHECKING:
    from gpufn.client.views.models import EngineView, ModelView
    from gpufn_core.spec.model_spec import TensorSpec

app = Group("models", help="List and describe the models that serve.")


@app.command("ls")
@json_option
def list_models(json: bool) -> None:
    """List the models, including those in functions."""
    with connect() as client:
        models = client.models()
    if json:
        print_json(models)
        return
    rows = [
        (model.name, model.revision, model.file, model.precision, model.max_batch, ", ".join(model.engines))
        for model in models
    ]
    print_table(
        ("name", "revision", "file", "precision", "max batch", "engines for"),
        rows,
        empty="no models: deploy one with `gpufn deploy MODEL.onnx`",
    )


@app.command()
@click.argument("name", cls=Argument, help="Name of the model, or FUNCTION.PARAMETER.")
@json_option
def describe(name: str, json: bool) -> None:
    """Show a model's tensors, shapes and engines."""
    with connect() as client:
        model = client.model(name)
        url = client.url
    if json:
        print_json(model)
        return
    shapes = [f"{tensor} {shape}" for profile in model.profiles for tensor, shape in profile.inputs.items()]
    engines = [(device, _engine(engine)) for device, by_rank in model.engines.items() for engine in by_rank]
    print_fields(
        [
            ("name", model.name),
            ("address", f"{url}/v2/models/{model.name}/infer" if model.name == model.function else ""),
            ("function", "" if model.name == model.function else f"{model.function}, as {model.parameter}"),
            ("revision", model.revision),
            ("file", model.file),
            ("inputs", _tensors(model.inputs)),
            ("outputs", _tensors(model.outputs)),
            ("shapes", "; ".join(shapes)),
            ("precision", model.precision),
            ("batching", _batching(model)),
            *engines,
        ]
    )


def _batching(model: ModelView) -> str:
    if model.batched:
        return f"up to {model.max_batch} rows of several calls"
    return f"none: {model.why_alone}" if model.why_alone else "none"


def _tensors(tensors: Iterable[TensorSpec]) -> str:
    """Format tensors such as `x FP32 [?, 3, 224, 224]`; a question mark is a dynamic size."""
    return ", ".join(
        f"{tensor.name} {tensor.datatype} [{', '.join('?' if size < 0 else str(size) for size in tensor.shape)}]"
        for tensor in tensors
    )


def _engine(engine: EngineView) -> str:
    parts = [f"{engine.backend} {engine.key[:12]}"]
    if engine.latency:
        parts.append(f"{duration(engine.latency.p50_s)} per run")
    if engine.accuracy:
        parts.append(f"relative L2 error {engine.accuracy.rel_l2:.1e}")
    return ", ".join([*parts, *engine.remarks])
