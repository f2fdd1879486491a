"""Digest of one function's code, independent of the other functions in its file. Pure.

`code_digest` covers the other files of the bundle in full, and the syntax tree of the file that declares the function:
comments, blank lines and line numbers do not count. It omits from the tree

- other functions of gpufn (`@gpu_function`, `@app.function`, `@asgi_app` and others) that no remaining statement
  mentions by name, if importing them has no side effects: no other decorator, base class or class-level statement, and
  no call in an option or a default;
- `if __name__ == "__main__":`, which workers do not run.

A mention is a name, an attribute or a string, in the file or in another module of the bundle. The digest
covers everything if the code can reach names that it does not mention (`globals()`, `getattr`, `import *` and others).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

_DYNAMIC: Final = frozenset(
    {
        *("*", "__dict__", "__getattr__", "__import__", "attrgetter", "dir", "eval", "exec", "getattr", "getmembers"),
        *("globals", "import_module", "importlib", "inspect", "locals", "methodcaller", "modules", "pickle", "vars"),
    }
)
_OPTIONS: Final = frozenset({"Batch", "Image", "Model", "Retry", "Schedule", "Volume", "gpufn"})
_WEB_DECORATORS: Final = frozenset({"asgi_app", "wsgi_app", "web_endpoint"})
_DECORATORS: Final = _WEB_DECORATORS | {"gpu_function"}
_DECORATORS_OF_APPS: Final = _WEB_DECORATORS | {"function"}
_METHOD_MARKS: Final = frozenset({"enter", "exit", "method", "park", "resume"})
_MAIN: Final = ast.dump(ast.parse('__name__ == "__main__"', mode="eval").body)
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def code_digest(files: Mapping[str, bytes], module: str, qualname: str) -> str:
    """Return the digest of function `qualname` of `module` in the bundle `files`, or "" if it cannot be computed."""
    entry = _entry_file(files, module)
    if entry is None:
        return ""
    others = {name: data for name, data in files.items() if name != entry}
    try:
        body = ast.parse(files[entry]).body
        relevant = _relevant_statements(body, others, PurePosixPath(entry), qualname.partition(".")[0])
    except (SyntaxError, ValueError, RecursionError):
        return ""
    digest = hashlib.sha256(ast.dump(ast.Module(relevant, [])).encode("utf-8", "surrogatepass"))
    for name in sorted(others):
        digest.update(f"\0{name}\0{hashlib.sha256(others[name]).hexdigest()}".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _entry_file(files: Mapping[str, bytes], module: str) -> str | None:
    path = module.replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__init__.py") if name in files), None)


def _relevant_statements(
    body: list[ast.stmt], others: Mapping[str, bytes], entry: PurePosixPath, own: str
) -> list[ast.stmt]:
    """Return the statements that the function may depend on, in order."""
    body = [statement for statement in body if not _is_main(statement)]
    apps = set(_apps(body))
    mentioned = _mentions(statement for statement in body if not _is_omittable(statement, own, apps))
    module = entry.parent.name if entry.stem == "__init__" else entry.stem
    for name, data in others.items():
        if name.endswith(".py"):
            mentions = _mentions([ast.parse(data)])
            # Dynamic access in another module matters only if that module names this one.
            mentioned |= mentions if module in mentions else mentions - _DYNAMIC
    if mentioned & _DYNAMIC:
        return body
    while True:
        relevant = [
            each for each in body if not _is_omittable(each, own, apps) or getattr(each, "name", "") in mentioned
        ]
        mentions = _mentions(relevant)
        if mentions & _DYNAMIC:
            return body
        if mentions <= mentioned:
            return relevant
        mentioned |= mentions


def _mentions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return names, attributes, parts of imports, and strings with their last part after a dot or colon."""
    mentions: set[str] = set()
    for node in nodes:
        for each in ast.walk(node):
            match each:
                case ast.Name(id=name) | ast.Attribute(attr=name):
                    mentions.add(name)
                case ast.Constant(value=str(text)):
                    mentions |= {text, text.rpartition(".")[2], text.rpartition(":")[2]}
                case ast.alias(name=name):
                    mentions |= set(name.split("."))
                case ast.ImportFrom(module=str(name)):
                    mentions |= set(name.split("."))
                case ast.Global(names=names) | ast.Nonlocal(names=names):
                    mentions |= set(names)
    return mentions


def _is_main(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.If) and not statement.orelse and ast.dump(statement.test) == _MAIN


def _apps(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that the file gives to its apps, as in `app = App("search")`."""
    for statement in body:
        match statement:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(func=ast.Name(id="App") | ast.Attribute(attr="App"))
            ):
                yield name


def _is_omittable(statement: ast.stmt, own: str, apps: Collection[str]) -> bool:
    """Return whether the statement is another function of gpufn whose import has no side effects."""
    if not isinstance(statement, _Definition) or statement.name == own:
        return False
    if len(statement.decorator_list) != 1 or not _is_declaration(statement.decorator_list[0], apps):
        return False
    if isinstance(statement, ast.ClassDef):
        return not statement.bases and not statement.keywords and all(map(_is_inert, statement.body))
    return _is_inert_header(statement, statement.decorator_list)


def _is_declaration(decorator: ast.expr, apps: Collection[str]) -> bool:
    """Return whether this is a decorator of gpufn, or of one of `apps`, with options that call nothing."""
    match _target(decorator):
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _DECORATORS:
            pass
        case ast.Attribute(value=ast.Name(id=app), attr=name) if app in apps and name in _DECORATORS_OF_APPS:
            pass
        case _:
            return False
    return _has_inert_arguments(decorator)


def _target(decorator: ast.expr) -> ast.expr:
    """Return the decorator without its arguments."""
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _has_inert_arguments(decorator: ast.expr) -> bool:
    arguments = [] if not isinstance(decorator, ast.Call) else [*decorator.args, *(k.value for k in decorator.keywords)]
    return all(map(_calls_nothing, arguments))


def _is_inert(statement: ast.stmt) -> bool:
    """Return whether a statement of a class body has no side effects."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return all(map(_is_mark, statement.decorator_list)) and _is_inert_header(statement, [])
        case ast.Pass() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(value=value):
            return _calls_nothing(value)
        case ast.AnnAssign(annotation=annotation, value=value):
            return _calls_nothing(annotation) and (value is None or _calls_nothing(value))
        case _:
            return False


def _is_mark(decorator: ast.expr) -> bool:
    match _target(decorator):
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _METHOD_MARKS and _has_inert_arguments(decorator)
    return False


def _is_inert_header(function: ast.FunctionDef | ast.AsyncFunctionDef, decorators: list[ast.expr]) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    hints = [each.annotation for each in every if each is not None and each.annotation is not None]
    defaults = [each for each in (*arguments.defaults, *arguments.kw_defaults) if each is not None]
    returns = [] if function.returns is None else [function.returns]
    return all(map(_calls_nothing, (*hints, *defaults, *returns)))


def _calls_nothing(expression: ast.expr) -> bool:
    """Return whether the expression calls nothing except the classes of gpufn's options."""
    return all(_is_option(each) for each in ast.walk(expression) if isinstance(each, ast.Call)) and not any(
        isinstance(each, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)) for each in ast.walk(expression)
    )


def _is_option(call: ast.Call) -> bool:
    """Match `Retry(3)`, `gpufn.Retry(3)` and `Image.python("3.12").pip_install("torch")`."""
    return next(_root_names(call.func), "") in _OPTIONS


def _root_names(expression: ast.expr) -> Iterator[str]:
    while not isinstance(expression, ast.Name):
        match expression:
            case ast.Attribute(value=inner) | ast.Call(func=inner):
                expression = inner
            case _:
                return
    yield expression.id
