"""Build files of images."""

from __future__ import annotations

import json

from gpufn_core.spec.image_spec import ImageFile, ImageSpec
from gpufn_runtime.agent.cache.image_recipe import recipe

FILE = "a" * 64
LOCK = "b" * 64


def steps(spec: ImageSpec) -> list[str]:
    return recipe(spec, bases="python:{python}-slim", worker_needs=["msgspec==1"]).text.splitlines()


def test_the_least_changing_layers_come_first() -> None:
    spec = ImageSpec(python="3.12", apt=("libgl1",), pip=("torch",), lock=LOCK, files=(ImageFile("/opt/x", FILE),))
    first_words = [line.split('"')[0].strip(' ["') + " " + line.rpartition(", ")[2].strip('"]') for line in steps(spec)]
    assert [word.split(" ")[0] for word in first_words] == ["FROM", "ENV", "RUN", "RUN", "COPY", "RUN", "RUN", "COPY"]
    assert [word.rpartition(" ")[2] for word in first_words[3:]] == [
        "libgl1", "/gpufn/lock.txt", "/gpufn/lock.txt", "torch", "/opt/x",
    ]  # fmt: skip


def test_a_name_replaces_the_base_image_of_the_node() -> None:
    assert steps(ImageSpec(python="3.13"))[0] == "FROM python:3.13-slim"
    assert steps(ImageSpec(base="ghcr.io/me/cuda:12"))[0] == "FROM ghcr.io/me/cuda:12"


def test_text_of_a_user_is_one_word_of_one_line() -> None:
    requirement = 'x; python_version < "3.12"'
    last = steps(ImageSpec(python="3.12", pip=(requirement,)))[-1]
    assert json.loads(last.removeprefix("RUN "))[-2:] == ["msgspec==1", requirement]


def test_packages_for_apt_are_quoted_arguments_of_the_shell() -> None:
    words = json.loads(steps(ImageSpec(python="3.12", apt=("libgl1", "git")))[-1].removeprefix("RUN "))
    assert words[:2] == ["sh", "-c"]
    assert words[3:] == ["apt", "libgl1", "git"]
    assert "libgl1" not in words[2]


def test_the_digest_is_that_of_all_that_is_built() -> None:
    specs = [
        ImageSpec(python="3.12"),
        ImageSpec(python="3.13"),
        ImageSpec(python="3.12", pip=("torch",)),
        ImageSpec(python="3.12", files=(ImageFile("/opt/x", FILE),)),
        ImageSpec(python="3.12", files=(ImageFile("/opt/x", LOCK),)),
    ]
    made = {recipe(spec, bases="b:{python}", worker_needs=["msgspec==1"]).digest for spec in specs}
    made.add(recipe(specs[0], bases="b:{python}", worker_needs=["msgspec==2"]).digest)
    assert len(made) == len(specs) + 1


def test_a_lock_replaces_the_packages_and_commands_come_last() -> None:
    spec = ImageSpec(python="3.12", pip=("torch",), locked="0" * 64, machine="x86_64", commands=("echo $HOME",))
    made = recipe(spec, bases="python:{python}", worker_needs=["msgspec"])
    assert (made.files, "torch" in made.text) == (("0" * 64,), False)
    assert made.text.splitlines()[-1] == 'RUN ["sh", "-c", "echo $HOME"]'
