"""The object that a user's function receives for a Model: a callable with tensors as inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufn_core.domain.devices.engine import EngineManifest
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.model_spec import TensorSpec
from gpufn_runtime.worker.engines.base import Array, Arrays, EngineSession
from gpufn_runtime.worker.engines.batching import Batching, Fitted
from gpufn_runtime.worker.engines.run_sharing import SharedRuns
from gpufn_runtime.worker.engines.tensors import as_array, described


class Outputs(dict[str, Array]):
    """Outputs of a model by name; `outputs.boxes` is `outputs["boxes"]`."""

    def __getattr__(self, name: str) -> Array:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the model has no output {name!r}; it has {', '.join(self)}") from None


class Session:
    """A loaded model. Thread-safe; waiting calls share a run, by rows.

    `session(images)` passes arrays in the order of `inputs`, `session(images=images)` by name. Arrays must have the
    model's dtypes and a shape that the engine's profiles accept; lists and numbers are converted. Returns the output's
    array, which must be treated as read-only, or `Outputs` if the model has several. In an async function
    ``await session.aio(images)`` does the same and lets other tasks run.

    Raises InvalidInput, which names the input that does not fit.
    """

    def __init__(self, engine: EngineSession) -> None:
        self.engine = engine
        self.rules = Batching(engine.manifest)
        self._runs = SharedRuns(engine, self.rules)
        self._specs = {spec.name: spec for spec in engine.manifest.inputs}

    @property
    def manifest(self) -> EngineManifest:
        return self.engine.manifest

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.inputs

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return self.manifest.outputs

    def __call__(self, *arrays: Any, **named: Any) -> Any:
        return self._result(self._runs.run(self._fitted(arrays, named)))

    async def aio(self, *arrays: Any, **named: Any) -> Any:
        return self._result(await self._runs.run_async(self._fitted(arrays, named)))

    def run(self, fitted: Fitted) -> Arrays:
        """Return all outputs, by name."""
        return self._runs.run(fitted)

    def __repr__(self) -> str:
        inputs, outputs = (", ".join(map(described, specs)) for specs in (self.inputs, self.outputs))
        return f"<session of {self.manifest.model} on {self.manifest.backend}: {inputs} to {outputs}>"

    def _fitted(self, arrays: tuple[Any, ...], named: Mapping[str, Any]) -> Fitted:
        if len(arrays) > len(self._specs):
            raise InvalidInput(f"{len(arrays)} arrays for {len(self._specs)} inputs: {', '.join(self._specs)}")
        inputs = dict(zip(self._specs, arrays, strict=False))
        for name, value in named.items():
            if name in inputs:
                raise InvalidInput(f"{name}: given twice", field=name)
            inputs[name] = value
        converted = {name: as_array(self._specs[name], value) for name, value in inputs.items() if name in self._specs}
        return self.rules.fit({**inputs, **converted})

    def _result(self, outputs: Arrays) -> Any:
        return next(iter(outputs.values())) if len(outputs) == 1 else Outputs(outputs)
