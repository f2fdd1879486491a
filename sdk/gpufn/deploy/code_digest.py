"""What the code of one function of a file comes to, whatever the other functions of the file do. Pure.

`code_digest` covers every file of the bundle but the one that declares the function, and of that file the syntax tree:
comments, blank lines and line numbers do not count. From the tree it leaves out

- other `@gpu_function`s, where nothing that is kept mentions their names, and where they do nothing when the file is
  imported: no further decorator, base class or class-level statement, and no call in an option or a default;
- `if __name__ == "__main__":`, which no worker runs.

A mention is a name, an attribute or a string, in the file or in another module of the bundle. Where code can reach a
name that it does not mention (`globals()`, `getattr`, `import *` and the like) nothing is left out.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

_DYNAMIC: Final = frozenset(
    {
        *("*", "__dict__", "__getattr__", "__import__", "attrgetter", "dir", "eval", "exec", "getattr", "getmembers"),
        *("globals", "import_module", "importlib", "inspect", "locals", "methodcaller", "modules", "pickle", "vars"),
    }
)
_OPTIONS: Final = frozenset({"Batch", "Image", "Model", "Retry", "Schedule", "gpufn"})
_METHOD_MARKS: Final = frozenset({"enter", "exit", "method", "park", "resume"})
_MAIN: Final = ast.dump(ast.parse('__name__ == "__main__"', mode="eval").body)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def code_digest(files: Mapping[str, bytes], module: str, qualname: str) -> str:
    """`files` are those of the bundle; `module` and `qualname` are the function's. "" where it cannot be known."""
    entry = _entry_of(files, module)
    if entry is None:
        return ""
    others = {name: data for name, data in files.items() if name != entry}
    try:
        body = ast.parse(files[entry]).body
        kept = _kept(body, others, PurePosixPath(entry), qualname.partition(".")[0])
    except (SyntaxError, ValueError, RecursionError):
        return ""
    digest = hashlib.sha256(ast.dump(ast.Module(kept, [])).encode("utf-8", "surrogatepass"))
    for name in sorted(others):
        digest.update(f"\0{name}\0{hashlib.sha256(others[name]).hexdigest()}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _entry_of(files: Mapping[str, bytes], module: str) -> str | None:
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), None)


def _kept(body: list[ast.stmt], others: Mapping[str, bytes], entry: PurePosixPath, own: str) -> list[ast.stmt]:
    """The statements that the function may depend on, in their order."""
    body = [statement for statement in body if not _is_main(statement)]
    mentioned = _mentions(statement for statement in body if not _may_go(statement, own))
    module = entry.parent.name if entry.stem == "__init__" else entry.stem
    for name, data in others.items():
        if name.endswith(".py"):
            found = _mentions([ast.parse(data)])
            # How another module reaches this one matters only where it names it.
            mentioned |= found if module in found else found - _DYNAMIC
    if mentioned & _DYNAMIC:
        return body
    while True:
        kept = [each for each in body if not _may_go(each, own) or getattr(each, "name", "") in mentioned]
        found = _mentions(kept)
        if found & _DYNAMIC:
            return body
        if found <= mentioned:
            return kept
        mentioned |= found


def _mentions(nodes: Iterable[ast.AST]) -> set[str]:
    """Names, attributes, the parts of imports, and strings with the last part of those that have dots."""
    found: set[str] = set()
    for node in nodes:
        for each in ast.walk(node):
            match each:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    found.add(name)
                case ast.Constant(value=str(text)):
                    found |= {text, text.rpartition(".")[2], text.rpartition(":")[2]}
                case ast.alias(name=name):
                    found |= set(name.split("."))
                case ast.ImportFrom(module=str(name)):
                    found |= set(name.split("."))
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    found |= set(names)
    return found


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and not statement.orelse and ast.dump(statement.test) == _MAIN


def _may_go(statement: ast.stmt, own: str) -> bool:
    """Whether it is another deployed function or class, which does nothing when its file is imported."""
    if not isinstance(statement, _Definition) or statement.name == own:
        return False
    if len(statement.decorator_list) != 1 or not _is_gpu_function(statement.decorator_list[0]):
        return False
    if isinstance(statement, ast.ClassDef):
        return not statement.bases and not statement.keywords and all(map(_is_idle, statement.body))
    return _is_idle_header(statement, statement.decorator_list)


def _is_gpu_function(decorator: ast.expr) -> bool:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
    arguments = [] if not isinstance(decorator, ast.Call) else [*decorator.args, *(k.value for k in decorator.keywords)]
    return name == "gpu_function" and all(map(_calls_nothing, arguments))


def _is_idle(statement: ast.stmt) -> bool:
    """Of a class's body."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            marks = [
                each.id if isinstance(each, ast.Name) else getattr(each, "attr", "")
                for each in statement.decorator_list
            ]
            return set(marks) <= _METHOD_MARKS and _is_idle_header(statement, [])
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=value):
            return _calls_nothing(value)
        case ast.AnnAssign(annotation=annotation, value=value):
            return _calls_nothing(annotation) and (value is None or _calls_nothing(value))
        case _:
            return False


def _is_idle_header(function: ast.FunctionDef | ast.AsyncFunctionDef, decorators: list[ast.expr]) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    hints = [each.annotation for each in every if each is not None and each.annotation is not None]
    defaults = [each for each in (*arguments.defaults, *arguments.kw_defaults) if each is not None]
    returns = [] if function.returns is None else [function.returns]
    return all(map(_calls_nothing, (*hints, *defaults, *returns)))


def _calls_nothing(expression: ast.expr) -> bool:
    """But the classes of gpufn's options."""
    return all(_is_option(each) for each in ast.walk(expression) if isinstance(each, ast.Call)) and not any(
        isinstance(each, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for each in ast.walk(expression)
    )


def _is_option(call: ast.Call) -> bool:
    """`Retry(3)`, `gpufn.Retry(3)`, `Image.python("3.12").pip_install("torch")`."""
    return next(_roots(call.func), "") in _OPTIONS


def _roots(expression: ast.expr) -> Iterator[str]:
    while not isinstance(expression, ast.Name):
        match expression:
            case ast.Attribute(value=inner) | ast.Call(func=inner):
                expression = inner
            case _:
                return
    yield expression.id
