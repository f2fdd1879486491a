"""What usual mistakes were meant as, for the end of the line that refuses them. Pure."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable

# What other programs call our commands.
_OTHER_WORDS = {
    "call": "invoke",
    "delete": "rm",
    "list": "ls",
    "log": "logs",
    "ps": "ls",
    "remove": "rm",
    "run": "invoke",
    "start": "up",
    "stop": "down",
}
_FLAGS = {"--json", "--yes", "-y"}  # options without a value
# Of commands that were given more words than they take: the first, the second and the last of these.
_ONE_TOO_MANY = {
    "deploy": "; one file at a time; a function of it is named by an option: gpufn deploy {0} --name {2}",
    "down": "; it stops the platform: `gpufn rm {0}` deletes a function, `gpufn scale {0} --max 0` rests it",
    "ls": "; `gpufn describe {0}` shows one",
    "rm": "; one function at a time",
    "rollback": "; the revision is an option: gpufn rollback {0} --revision {2}",
    "scale": "; the numbers are options: gpufn scale {0} --min {1} --max {2}",
    "up": "; the port is an option: gpufn up --port {2}",
}


def command_near(typed: str, commands: Iterable[str]) -> str:
    """
    >>> [command_near(typed, ("describe", "nodes", "rm")) for typed in ("desc", "delete", "node", "greet", "r")]
    ["; did you mean 'describe'?", "; did you mean 'rm'?", "; did you mean 'nodes'?", '', "; did you mean 'rm'?"]
    """
    if typed == "help":
        return "; `gpufn --help` lists them, and `gpufn COMMAND --help` tells of one"
    known = _OTHER_WORDS.get(typed)
    begun = [name for name in commands if typed and name.startswith(typed)]
    near = [known] if known else begun or difflib.get_close_matches(typed, commands, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def meant(refusal: str, typed: list[str]) -> str:
    """Of `typed`, a command and what follows it, which was refused with these words."""
    if "unexpected extra argument" in refusal:
        if any("{" in word for word in typed):
            return """; a JSON object is one argument: put it in single quotes, as in '{"x": 1}'"""
        command, *words = (word for word in typed if word not in _FLAGS)
        if any(word.startswith("-") for word in words):  # which of the others is an option's?
            return ""
        if command in ("invoke", "submit") and (arguments := as_json(words[1:])):
            return f"; the arguments are one JSON object: {arguments}"
        return _ONE_TOO_MANY.get(command, "").format(words[0], words[min(1, len(words) - 1)], words[-1])
    if refusal.endswith("No such option: --url"):
        return f"; it stands before the command, as in gpufn --url URL {typed[0]}"
    return ""


def as_json(words: Iterable[str]) -> str:
    """Words such as `x=1` as the JSON object that they may stand for, quoted for a shell; "" when one is no such word.

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
