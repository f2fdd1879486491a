"""An exception of a function keeps its type if the caller has the class, and a hostile node cannot choose code."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import traceback
from typing import Any, ClassVar, NoReturn

import pytest

from gpufn import gpu_function
from gpufn.testing import run_locally
from gpufn_core.encoding.raised_types import as_local_type, classes_of
from gpufn_core.errors import ErrorInfo, FunctionRaised, InvalidInput, ResultNotEncodable, error_from


class Refused(KeyError):
    """Its constructor requires an argument that a remote error does not have."""

    ran: ClassVar[list[Any]] = []

    def __init__(self, code: int, detail: str) -> None:
        self.ran.append(code)
        super().__init__(detail)
        self.code_of_theirs = code

    @property
    def message(self) -> NoReturn:
        raise AssertionError("of the user's")

    def __str__(self) -> str:
        return "of the user's"


class Both(OSError, ValueError): ...


class Registered(LookupError):
    names: ClassVar[list[str]] = []

    def __init_subclass__(cls) -> None:
        cls.names.append(cls.__name__)


class Wary(ArithmeticError):
    def __setattr__(self, name: str, value: Any) -> None:
        raise AssertionError(name)


class Meta(type):
    pass


class WithMeta(TypeError, metaclass=Meta): ...


def arrived(*classes: str, message: str = "no", error_type: str = "Some") -> FunctionRaised:
    error = error_from(ErrorInfo("function_raised", message, error_type=error_type, error_classes=classes))
    assert type(error) is FunctionRaised
    return as_local_type(error)


@pytest.mark.parametrize(
    "kind",
    [
        KeyError, ValueError, ZeroDivisionError, OSError, FileNotFoundError, TimeoutError, UnicodeDecodeError,
        UnicodeEncodeError, ImportError, ModuleNotFoundError, AttributeError, NameError, SyntaxError, RuntimeError,
        RecursionError, MemoryError, AssertionError, NotImplementedError, DeprecationWarning, json.JSONDecodeError,
        Refused, Both,
    ],
)  # fmt: skip
def test_the_caller_catches_the_exception_of_the_function(kind: type[Exception]) -> None:
    own = arrived(*classes_of(kind), message="said", error_type=kind.__qualname__)
    with pytest.raises(kind) as caught:
        raise own
    assert isinstance(caught.value, FunctionRaised)
    assert (str(own), repr(own)) == (f"{kind.__qualname__}: said", f"FunctionRaised('{kind.__qualname__}: said')")
    assert (own.message, own.error_type, own.code) == ("said", kind.__qualname__, "function_raised")
    assert own.args == ("said",)
    assert own.info().error_classes == classes_of(kind)
    shown = "".join(traceback.format_exception(own))
    assert f"{kind.__qualname__}: said" in shown
    assert Refused.ran == []


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
@pytest.mark.parametrize("kind", [KeyError, OSError, UnicodeDecodeError, Refused])
def test_it_can_be_copied_and_pickled(kind: type[Exception], again: Any) -> None:
    own = arrived(*classes_of(kind), error_type=kind.__qualname__)
    own.add_note("where")
    other = again(own)
    assert (type(other), str(other), other.__notes__) == (type(own), str(own), ["where"])


def test_the_nearest_class_that_is_loaded_here_is_taken() -> None:
    assert isinstance(arrived("nowhere:Own", "builtins:KeyError", "builtins:LookupError"), KeyError)
    assert isinstance(arrived(*classes_of(Registered)), LookupError)
    assert not isinstance(arrived(*classes_of(Registered)), Registered)
    assert isinstance(arrived(*classes_of(Wary)), ArithmeticError)
    assert isinstance(arrived(*classes_of(WithMeta)), TypeError)
    assert Registered.names == []


@pytest.mark.parametrize(
    "name",
    [
        "builtins:SystemExit", "builtins:KeyboardInterrupt", "builtins:GeneratorExit", "builtins:StopIteration",
        "builtins:StopAsyncIteration", "builtins:BaseException", "builtins:Exception", "builtins:ExceptionGroup",
        "asyncio:CancelledError", "asyncio.exceptions:CancelledError", "builtins:int", "builtins:eval", "os:system",
        "gpufn.errors:InvalidInput", "gpufn.errors:FunctionRaised", "gpufn.errors:WorkerLost", "builtins:", ":", "",
        "builtins", "builtins:KeyError.__class__", "builtins:KeyError:x", "nowhere:Nothing", "builtins:\ud800",
    ],
)  # fmt: skip
def test_nothing_else_is_made_of_a_name(name: str) -> None:
    assert type(arrived(name)) is FunctionRaised


def test_no_module_is_imported_on_behalf_of_a_node(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')\nclass Planted(Exception): ...")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert type(arrived("planted:Planted")) is FunctionRaised
    assert "planted" not in sys.modules
    asked = []

    class Lazy(type(sys)):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    arrived("lazy:Error")
    assert asked == []


def test_other_errors_stay_unchanged() -> None:
    not_encodable = ResultNotEncodable("no", error_classes=classes_of(KeyError))
    assert as_local_type(not_encodable) is not_encodable
    with run_locally(), pytest.raises(InvalidInput) as caught:
        raises_ours.remote()
    assert type(caught.value) is InvalidInput


@gpu_function
def raises_ours() -> None:
    raise InvalidInput("no")


@gpu_function
def looks_up(key: str) -> int:
    return {"a": 1}[key]


@gpu_function
def yields_then_raises(n: int) -> Any:
    yield n
    raise FileNotFoundError("none")


@gpu_function
def calls_another(key: str) -> int:
    try:
        return looks_up.remote(key)
    except KeyError:
        return -1


@gpu_function
def passes_on(key: str) -> int:
    return looks_up.remote(key)


def test_every_way_of_calling_keeps_the_type() -> None:
    with run_locally():
        with pytest.raises(KeyError, match="'b'") as caught:
            looks_up.remote("b")
        assert isinstance(caught.value, FunctionRaised)
        assert "In the worker:" in "".join(caught.value.__notes__)
        with pytest.raises(KeyError):
            looks_up.spawn("b").result()
        with pytest.raises(KeyError):
            list(looks_up.map(["a", "b"]))
        first, second = looks_up.map(["a", "b"], return_exceptions=True)
        assert (first, isinstance(second, KeyError)) == (1, True)
        items = yields_then_raises.stream(1)
        assert next(items) == 1
        with pytest.raises(FileNotFoundError):
            next(items)
        assert calls_another.remote("b") == -1
        with pytest.raises(KeyError):
            passes_on.remote("b")
