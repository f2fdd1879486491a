"""The content of a deploy: the spec of each function, its bundle, and the files of its models and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpufn_core.domain.revision import Source
from gpufn_core.errors import InvalidSpec
from gpufn_core.ids import Digest
from gpufn_core.spec.function_spec import Batch, EntryPoint, FunctionSpec, MethodSpec, Packaging
from gpufn_core.spec.naming.names import HOME, Home

if TYPE_CHECKING:
    from gpufn.declare.model import Model
    from gpufn.deploy.bundle import AnyFunction


class Deployable(NamedTuple):
    """A spec, its bundle, the paths of the files to upload by digest, and the source of the deploy.

    `code` is the digest of the function's own code; the bundle may contain other functions too.
    """

    spec: FunctionSpec
    bundle: Digest
    data: bytes
    paths: Mapping[str, Path] = {}
    source: Source | None = None
    code: str = ""

    @property
    def size(self) -> int:
        """Bytes of the bundle and the files to upload."""
        return len(self.data) + sum(path.stat().st_size for path in self.paths.values())


def deployables(
    functions: Iterable[AnyFunction],
    include: Sequence[str] = (),
    home: Home = HOME,
    on_progress: Callable[[str], None] = lambda progress: None,
) -> Iterator[Deployable]:
    """Read and hash the code, the models and the weights of each function, and lock its packages. `home` is the
    environment, and the app of functions that declare none.

    Raises InvalidSpec, InvalidBundle, and ArtifactUnavailable if the origin of weights does not respond.
    """
    from gpufn.declare import image as _image  # noqa: PLC0415
    from gpufn.deploy.bundle import bundles_of  # noqa: PLC0415
    from gpufn.deploy.code_digest import code_digest  # noqa: PLC0415
    from gpufn.deploy.deploy_source import source_of  # noqa: PLC0415
    from gpufn.deploy.model_files import folder_of, prepare_all  # noqa: PLC0415
    from gpufn.deploy.weights.files import prepare_each  # noqa: PLC0415

    functions = _checked(functions)
    declared_images = {
        function: (declared, folder_of(function.raw))
        for function in functions
        if (declared := function.settings.declared_image) is not None
    }
    prepared_images = {each: _image.prepare(*each, on_progress) for each in dict.fromkeys(declared_images.values())}
    images = {function: prepared_images[each] for function, each in declared_images.items()}
    weights = prepare_each(each for function in functions for each in function.settings.declared_weights)
    contents = {name: data for image in images.values() for name, data in image.contents.items()}
    for function, packaging, bundle in bundles_of(functions, include, contents):
        models = prepare_all(function.settings.declared_models, folder_of(function.raw))
        image = images[function].spec if function in images else None
        used = [weights[each] for each in function.settings.declared_weights]
        spec = function.spec(
            packaging,
            bundle.modules,
            tuple(model.spec for model in models),
            image,
            tuple(prepared.spec for prepared in used),
            home=home,
        )
        paths = {digest: path for model in models for digest, path in model.paths.items()}
        paths |= {digest: path for prepared in used for digest, path in prepared.paths.items()}
        code = ""
        if packaging is Packaging.SOURCE:
            code = code_digest(bundle.contents(), spec.entry.module, spec.entry.qualname)
        yield Deployable(spec, bundle.digest, bundle.data, paths, source_of(function), code)


def _checked(functions: Iterable[AnyFunction]) -> list[AnyFunction]:
    """Return the functions, each once. Raises InvalidSpec if one is no function, or if two have the same name."""
    from gpufn.declare.function import Function, FunctionClass  # noqa: PLC0415

    functions = list(functions)
    for function in functions:
        if not isinstance(function, (Function, FunctionClass)):
            raise _not_a_function(function)
    functions = list(dict.fromkeys(functions))
    by_name: dict[str, AnyFunction] = {}
    for function in functions:
        if (other := by_name.setdefault(function.name, function)) is not function:
            both = f"{other.raw.__name__} and {function.raw.__name__}"
            raise InvalidSpec(f"{both} would both be deployed as {function.name}: set name=... on one of them")
    return functions


def _not_a_function(value: Any) -> InvalidSpec:
    hint = ""
    if isinstance(value, str):
        hint = "; to deploy a file, run `gpufn deploy FILE`"
    elif isinstance(value, Iterable):
        hint = "; deploy takes functions one by one: deploy(*functions)"
    return InvalidSpec(
        f"{value!r} is not a @gpu_function: deploy takes functions and classes with that decorator{hint}"
    )


def deployable_model(model: Model, options: Mapping[str, Any], home: Home = HOME) -> Deployable:
    """Return a model as a function without code. Relative paths start at the working folder.

    `options` are the options of `@gpu_function`, with the function's name. Calls are batched to up to `max_batch` rows;
    with 1, the worker decodes one call while another runs.
    """
    from gpufn.declare.options import settings_from  # noqa: PLC0415
    from gpufn.deploy.bundle import EMPTY_BUNDLE  # noqa: PLC0415
    from gpufn.deploy.model_files import prepare  # noqa: PLC0415

    batching = {"batch": Batch(model.max_batch)} if model.max_batch > 1 else {"concurrency": 2}
    settings = settings_from({**batching, **options}, "model")
    prepared = prepare("model", model, Path.cwd())
    spec = settings.spec(
        (MethodSpec(parameters={"type": "object"}),),
        is_class=False,
        entry=EntryPoint("", "", Packaging.MODEL),
        models=(prepared.spec,),
        home=home,
    )
    return Deployable(spec, EMPTY_BUNDLE.digest, EMPTY_BUNDLE.data, prepared.paths)
