"""Hints for common mistakes, appended to usage errors. Pure."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable

# Names of similar commands in other programs.
_ALIASES = {
    "call": "invoke",
    "delete": "rm",
    "list": "ls",
    "log": "logs",
    "ps": "ls",
    "remove": "rm",
    "start": "up",
    "stop": "down",
}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_SPAN = re.compile(r"Invalid value for '(--[a-z-]+)'.*'(\d+(?:\.\d+)?)([smhd])' is not a valid float")
_FLAGS = {"--json", "--yes", "-y"}  # options without a value
_RUN_OPTIONS = ("--env", "--include", "--json", "--output", "--timeout", "-o")
# Hints for commands with too many arguments. {0}, {1} and {2} are the first, the second and the last argument.
_EXTRA_ARGUMENT_HINTS = {
    "deploy": "; one file at a time; to deploy one function of it: gpufn deploy {0} --name {2}",
    "down": "; it stops the platform. `gpufn rm {0}` deletes a function, `gpufn scale {0} --max 0` stops its workers",
    "ls": "; `gpufn describe {0}` shows one function",
    "rm": "; one function at a time",
    "rollback": "; the revision is an option: gpufn rollback {0} --revision {2}",
    "scale": "; the numbers are options: gpufn scale {0} --min {1} --max {2}",
    "up": "; the port is an option: gpufn up --port {2}",
}


def similar_command(name: str, commands: Collection[str]) -> str:
    """
    >>> [similar_command(name, ("describe", "nodes", "rm")) for name in ("desc", "delete", "node", "greet", "r")]
    ["; did you mean 'describe'?", "; did you mean 'rm'?", "; did you mean 'nodes'?", '', "; did you mean 'rm'?"]
    """
    if name == "help":
        return "; `gpufn --help` lists the commands, and `gpufn COMMAND --help` describes one"
    alias = _ALIASES.get(name, "")
    with_prefix = [command for command in commands if name and command.startswith(name)]
    similar = [alias] if alias in commands else with_prefix or difflib.get_close_matches(name, commands, n=1)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def usage_hint(message: str, argv: list[str]) -> str:  # noqa: PLR0911
    """Return a hint for the usage error `message` of `argv`, a command and its arguments."""
    if "unexpected extra argument" in message:
        if any("{" in word for word in argv):
            return """; a JSON object is one argument: put it in single quotes, as in '{"x": 1}'"""
        command, *words = (word for word in argv if word not in _FLAGS)
        if command == "run":
            return "; the parameters are options, as in `--NAME VALUE`"
        if any(word.startswith("-") for word in words):  # a word may be the value of this option
            return ""
        if command in ("invoke", "submit") and (arguments := as_json(words[1:])):
            return f"; the arguments are one JSON object: {arguments}"
        return _EXTRA_ARGUMENT_HINTS.get(command, "").format(words[0], words[min(1, len(words) - 1)], words[-1])
    if argv[:1] == ["run"] and any(message.startswith(f"No such option '{option}'") for option in _RUN_OPTIONS):
        return "; the options of gpufn run stand before the file"
    if span := _SPAN.search(message):
        return f"; it is in seconds: {span[1]} {float(span[2]) * _SECONDS[span[3]]:g}"
    if message.startswith(("No such option '-y'", "No such option '--yes'")):
        return "; this command does not ask"
    if message.startswith("No such option") and "--url" in message:
        return f"; put it before the command: gpufn --url URL {argv[0]}"
    return ""


def as_json(words: Iterable[str]) -> str:
    """Convert words such as `x=1` to a JSON object, quoted for a shell. Return "" if a word has another form.

    >>> as_json(["name=you", "x=3"]), as_json(["name"])
    ('\\'{"name": "you", "x": 3}\\'', '')
    """
    pairs = [word.partition("=") for word in words]
    if not all(name.isidentifier() and equals for name, equals, _ in pairs):
        return ""
    text = json.dumps({name: _value(value) for name, _, value in pairs}, ensure_ascii=False)
    return "" if "'" in text else f"'{text}'"


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
