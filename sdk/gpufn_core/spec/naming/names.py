"""Names of functions: `predict`, or `env/app/predict` outside the app `default` of the environment `default`. Pure.

The full name is the identity of a function in every record, subject and path. A caller may leave parts out: `Names`
finds the function that is meant.

    predict                 default/default/predict, else the only visible function `predict`
    search/predict          any environment
    prod/search/predict     the full name
    prod/-/predict          `-` leaves a part out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from gpufn_core.errors import AmbiguousFunction, FunctionNotFound, InvalidSpec

DEFAULT: Final = "default"
ANY: Final = "-"
# Path segments after the function in the gateway's URLs. /v1/functions/f/revisions/3 must not be a full name.
RESERVED_APPS: Final = frozenset({"invocations", "maps", "revisions", "versions"})
# Path segments after /v2/ in the Open Inference Protocol, where the other protocols have a function name.
RESERVED_NAMES: Final = frozenset(
    {"models", "health", "repository", "logging", "trace", "systemsharedmemory", "cudasharedmemory"}
)
_GROUP: Final = r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?"  # an environment or an app: not a ULID, which starts with a digit
_BASE: Final = r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?"
_NOT_RESERVED: Final = rf"(?!(?:{'|'.join(sorted(RESERVED_APPS))})/)"
GROUP: Final = re.compile(_GROUP)
BASE_NAME: Final = re.compile(_BASE)
FULL_NAME: Final = re.compile(rf"(?:(?!{DEFAULT}/{DEFAULT}/){_GROUP}/{_NOT_RESERVED}{_GROUP}/)?{_BASE}")
# Python names that `function_name` turns into the last part of a function's name.
_SPELLED_BASE: Final = r"_*[A-Za-z0-9](?:[A-Za-z0-9_-]{0,38}[A-Za-z0-9])?_*"
SPELLED_NAME: Final = re.compile(rf"(?:(?:-|{_GROUP})/{_NOT_RESERVED}(?:-|{_GROUP})/)?{_SPELLED_BASE}")
# One or three segments of a path: a name as callers write it, perhaps with a method or an id at its end.
# The text in parentheses chooses a variant (`gpufn_core.spec.naming.variant_names`).
IN_PATH: Final = re.compile(rf"(?:(?:-|{_GROUP})/{_NOT_RESERVED}(?:-|{_GROUP})/)?(?:[^/(]+\([^()]*\)[^/]*|[^/]+)")
_MAX_CANDIDATES: Final = 10  # in an error message


class Parts(NamedTuple):
    """The parts of a name. "" represents an omitted part."""

    env: str
    app: str
    base: str


class Home(NamedTuple):
    """The environment and app in which a caller looks first."""

    env: str = DEFAULT
    app: str = DEFAULT


HOME: Final = Home()


def function_name(name: str) -> str:
    """Return the deployed name for a Python name: `f_x` is deployed as `f-x`. Both spellings reach the function.

    >>> function_name("f_x"), function_name("prod/search/f_x")
    ('f-x', 'prod/search/f-x')
    """
    groups, slash, base = name.rpartition("/")
    return f"{groups}{slash}{base.strip('_').replace('_', '-').lower()}"


def is_function_name(name: str) -> bool:
    """Return whether `name` is a full name."""
    return FULL_NAME.fullmatch(name) is not None


def full_name(env: str, app: str, base: str) -> str:
    """Return the full name of a function.

    >>> full_name("prod", "search", "predict"), full_name("default", "default", "predict")
    ('prod/search/predict', 'predict')
    """
    return base if env == app == DEFAULT else f"{env}/{app}/{base}"


def canonical(name: str) -> str:
    """Return the full name for a caller's name, with `default` for the parts that it leaves out.

    >>> canonical("f_x"), canonical("default/default/f"), canonical("prod/-/f")
    ('f-x', 'f', 'prod/default/f')
    """
    env, app, base = _parse(function_name(name))
    return full_name(env or DEFAULT, app or DEFAULT, base)


def parts_of(full: str) -> Parts:
    """Return the parts of a full name.

    >>> parts_of("predict")
    Parts(env='default', app='default', base='predict')
    """
    env, app, base = full.split("/") if "/" in full else (DEFAULT, DEFAULT, full)
    return Parts(env, app, base)


def home_of(full: str) -> Home:
    """Return the environment and app of a function: the home of the calls that it makes."""
    return Home(*parts_of(full)[:2])


def url_name(name: str) -> str:
    """Return `name` with one or three parts, as the paths of the gateway have it.

    >>> url_name("predict"), url_name("search/predict"), url_name("prod/search/predict")
    ('predict', '-/search/predict', 'prod/search/predict')
    """
    return f"{ANY}/{name}" if name.count("/") == 1 else name


def in_environment(name: str, env: str) -> str:
    """Return `name` in the environment `env`, unless it names one itself.

    >>> in_environment("predict", "prod"), in_environment("search/predict", "prod"), in_environment("a/b/c", "prod")
    ('prod/-/predict', 'prod/search/predict', 'a/b/c')
    """
    match name.count("/"):
        case 0:
            return f"{env}/{ANY}/{name}"
        case 1:
            return f"{env}/{name}"
        case _:
            return name


def is_group_or_any(text: str) -> bool:
    """Return whether `text` can be the environment or the app in a caller's name."""
    return text == ANY or GROUP.fullmatch(text) is not None


def check_group(kind: str, name: str) -> None:
    """Raise InvalidSpec unless `name` can be the name of an environment, app or team, as given by `kind`."""
    if not isinstance(name, str) or GROUP.fullmatch(name) is None:
        raise InvalidSpec(
            f"{name!r} cannot name {'a' if kind == 'team' else 'an'} {kind}: use a to z, 0 to 9 and hyphens, at most "
            "40 characters, with a letter first and a letter or digit last"
        )
    if kind == "app" and name in RESERVED_APPS:
        raise InvalidSpec(f"{name!r} is reserved by the paths of the gateway: choose another name for the app")


def can_mean(name: str, full: str) -> bool:
    """Return whether a caller's `name` can mean the function of the full name `full`.

    >>> can_mean("predict", "prod/search/predict"), can_mean("other/predict", "prod/search/predict")
    (True, False)
    """
    wanted, parts = _parse(function_name(name)), parts_of(full)
    return wanted.base == parts.base and _fits(parts, wanted)


class Names:
    """The full names of the known functions, by their last part."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._by_base: dict[str, set[str]] = {}
        self._temporary: set[str] = set()
        for name in names:
            self.add(name)

    def add(self, full: str, *, is_temporary: bool = False) -> None:
        """Add or change a name. A temporary function does not make the short name of a permanent one ambiguous."""
        self._by_base.setdefault(parts_of(full).base, set()).add(full)
        if is_temporary:
            self._temporary.add(full)
        else:
            self._temporary.discard(full)

    def discard(self, full: str) -> None:
        self._temporary.discard(full)
        base = parts_of(full).base
        others = self._by_base.get(base, set()) - {full}
        if others:
            self._by_base[base] = others
        else:
            self._by_base.pop(base, None)

    def find(self, name: str, home: Home = HOME, may_see: Callable[[str], bool] = lambda full: True) -> str:
        """Return the full name of the function that `name` means. The function in `home` comes first; otherwise the
        name must fit one function that the caller may see, or one that is permanent.

        Raises FunctionNotFound, and AmbiguousFunction with the full names that fit.
        """
        wanted = _parse(function_name(name))
        known = self._by_base.get(wanted.base, set[str]())
        at_home = full_name(wanted.env or home.env, wanted.app or home.app, wanted.base)
        if at_home in known and may_see(at_home):
            return at_home
        fitting = sorted(full for full in known if _fits(parts_of(full), wanted) and may_see(full))
        if len(fitting) > 1:
            permanent = [full for full in fitting if full not in self._temporary]
            if len(permanent) == 1:
                return permanent[0]
            more = f" and {len(fitting) - _MAX_CANDIDATES} others" if len(fitting) > _MAX_CANDIDATES else ""
            raise AmbiguousFunction(
                f"{shown(name)} can be {', '.join(fitting[:_MAX_CANDIDATES])}{more}: write one of them."
            )
        if not fitting:
            raise FunctionNotFound(f"There is no function {shown(name)}.")
        return fitting[0]

    def __iter__(self) -> Iterator[str]:
        return (name for names in self._by_base.values() for name in names)


def shown(name: str) -> str:
    """Return a name that a user wrote, shortened for a message, without the `-` that clients put in front."""
    name = name.removeprefix(f"{ANY}/")
    return repr(name if len(name) <= 130 else f"{name[:130]}...")


def _parse(name: str) -> Parts:
    groups, _, base = name.rpartition("/")
    env, _, app = groups.rpartition("/")
    return Parts("" if env == ANY else env, "" if app == ANY else app, base)


def _fits(full: Parts, wanted: Parts) -> bool:
    """Whether the groups of `full` equal the groups that `wanted` names."""
    return wanted.env in ("", full.env) and wanted.app in ("", full.app)
