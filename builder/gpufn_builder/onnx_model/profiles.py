"""The shapes that an engine accepts: from the spec, or derived from `max_batch` and the samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gpufn_builder.onnx_model.tensors import MAX_ELEMENTS, describe_tensor
from gpufn_core.domain.devices.engine import BuildStage
from gpufn_core.errors import BuildFailed
from gpufn_core.spec.model_spec import ModelSpec, ShapeProfile, ShapeRange, TensorSpec

Shape = tuple[int, ...]
_STAGE: Final = BuildStage.INGEST  # errors here are errors of the upload


def resolve_profiles(
    inputs: Sequence[TensorSpec], spec: ModelSpec, sample_shapes: Mapping[str, Sequence[Shape]], *, batched: bool = True
) -> tuple[ShapeProfile, ...]:
    """Return the profiles of a model with `inputs`; none if all sizes are fixed.

    `sample_shapes` are the shapes of each sample, by input. `batched`: a dynamic first dimension counts rows, from 1 to
    `max_batch`. Raises BuildFailed(stage="ingest") with the name of the input.
    """
    profiles = _resolved(inputs, spec, sample_shapes, batched)
    for tensor in inputs:
        largest = [each.inputs[tensor.name].max for each in profiles if tensor.name in each.inputs] or [tensor.shape]
        if (elements := max(map(math.prod, largest))) > MAX_ELEMENTS:
            raise _error(tensor.name, f"{tensor.name} has up to {elements} elements; {MAX_ELEMENTS} are allowed")
    return profiles


def _resolved(
    inputs: Sequence[TensorSpec], spec: ModelSpec, sample_shapes: Mapping[str, Sequence[Shape]], batched: bool
) -> tuple[ShapeProfile, ...]:
    _check_max_batch(inputs, spec)
    if spec.profiles:
        profiles = tuple(_checked(profile, inputs) for profile in spec.profiles)
        _check_samples(profiles, inputs, sample_shapes)
        return profiles if any(profile.inputs for profile in profiles) else ()
    _check_known(inputs, sample_shapes)
    ranges = {
        tensor.name: _derived(tensor, spec, sample_shapes.get(tensor.name, ()), batched)
        for tensor in inputs
        if -1 in tensor.shape
    }
    return (ShapeProfile(ranges),) if ranges else ()


def _check_max_batch(inputs: Sequence[TensorSpec], spec: ModelSpec) -> None:
    if spec.max_batch > 1 and inputs and not any(tensor.shape[:1] == (-1,) for tensor in inputs):
        raise _error(
            inputs[0].name,
            f"max_batch is {spec.max_batch}, and the first dimension of {describe_tensor(inputs[0])} is fixed: export "
            "the model with a dynamic one, or leave max_batch out",
        )


def _checked(profile: ShapeProfile, inputs: Sequence[TensorSpec]) -> ShapeProfile:
    """Return `profile` without inputs of fixed shape."""
    known = {tensor.name: tensor for tensor in inputs}
    for name, range_ in profile.inputs.items():
        if name not in known:
            raise _error(
                name, f"shapes= (--shape) names {name}, and the model's inputs are {', '.join(known) or 'none'}"
            )
        shape = known[name].shape
        if len(range_.min) != len(shape):
            raise _error(name, f"shapes= (--shape) has {len(range_.min)} dimensions for {name}, which has {len(shape)}")
        for axis, size in enumerate(shape):
            if size >= 0 and not range_.min[axis] == range_.max[axis] == size:
                raise _error(
                    name,
                    f"dimension {axis} of {name} is always {size}, and shapes= (--shape) has {range_.min[axis]} to "
                    f"{range_.max[axis]} for it",
                )
    dynamic = [tensor.name for tensor in inputs if -1 in tensor.shape]
    for name in dynamic:
        if name not in profile.inputs:
            raise _error(name, f"shapes= (--shape) has no entry for {name}, which has dynamic sizes")
    return ShapeProfile({name: profile.inputs[name] for name in dynamic})


def _check_samples(
    profiles: Sequence[ShapeProfile], inputs: Sequence[TensorSpec], sample_shapes: Mapping[str, Sequence[Shape]]
) -> None:
    for tensor in inputs:
        ranges = [profile.inputs[tensor.name] for profile in profiles if tensor.name in profile.inputs]
        for index, shape in enumerate(sample_shapes.get(tensor.name, ())):
            if ranges and not any(range_.accepts(shape) for range_ in ranges):
                listed = "; ".join(str(range_) for range_ in ranges)
                raise _error(
                    tensor.name, f"sample {index} has the shape {list(shape)} for {tensor.name}, outside of {listed}"
                )


def _check_known(inputs: Sequence[TensorSpec], sample_shapes: Mapping[str, Sequence[Shape]]) -> None:
    """Raise BuildFailed if sizes other than the number of rows are dynamic and there are no samples."""
    unknown = [tensor for tensor in inputs if -1 in tensor.shape[1:] and not sample_shapes.get(tensor.name)]
    if unknown:
        described = " and ".join(map(describe_tensor, unknown))
        options = " ".join(f"--shape {tensor.name}={_template(tensor.shape)}" for tensor in unknown)
        raise _error(
            unknown[0].name,
            f"the sizes of {described} are dynamic and unknown: set shapes= ({options}) or samples= (--samples)",
        )


def _template(shape: Shape) -> str:
    """
    >>> _template((-1, 3, -1, -1))
    '1x3x?x?'
    """
    sizes = ("?" if size < 0 else str(size) for size in shape[1:])
    return "x".join(["1" if shape[0] < 0 else str(shape[0]), *sizes])


def _derived(tensor: TensorSpec, spec: ModelSpec, shapes: Sequence[Shape], batched: bool) -> ShapeRange:
    ranges = [_sizes(tensor, axis, spec, shapes, batched) for axis in range(len(tensor.shape))]
    low, best, high = zip(*ranges, strict=True)
    return ShapeRange(low, best, high)


def _sizes(
    tensor: TensorSpec, axis: int, spec: ModelSpec, shapes: Sequence[Shape], batched: bool
) -> tuple[int, int, int]:
    """Return the least, best and greatest size along one axis."""
    if tensor.shape[axis] >= 0:
        return (tensor.shape[axis],) * 3
    seen = sorted(shape[axis] for shape in shapes)
    if axis == 0 and (batched or not seen):
        if seen and seen[-1] > spec.max_batch:
            raise _error(
                tensor.name,
                f"a sample has {seen[-1]} rows of {tensor.name}, and max_batch is {spec.max_batch}: set "
                f"max_batch={seen[-1]} (--max-batch {seen[-1]}) or shapes= (--shape)",
            )
        return 1, spec.max_batch, spec.max_batch
    return seen[0], seen[len(seen) // 2], seen[-1]


def _error(name: str, message: str) -> BuildFailed:
    return BuildFailed(message, stage=_STAGE, node=name)
