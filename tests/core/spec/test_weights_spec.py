"""Manifests of weights: sources, paths and addresses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpufn_core.errors import InvalidSpec
from gpufn_core.protocol.limits import LARGEST_INTEGER
from gpufn_core.spec.weights_spec import MAX_FILES, Source, WeightsFile, WeightsSpec, check_weights, parse_source

_DIGEST, _OTHER = "a" * 64, "b" * 64


def _weights(*files: WeightsFile, source: str = "./weights", **fields: Any) -> WeightsSpec:
    return WeightsSpec(source=source, files=files or (WeightsFile("w", 1, _DIGEST),), **fields)


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("./weights", Source("", "./weights")),
        ("hf://org/model", Source("hf", "org/model", "", "main")),
        ("hf://org/model@v1/a/b.safetensors", Source("hf", "org/model", "a/b.safetensors", "v1")),
        ("hf://org/model@refs%2Fpr%2F1", Source("hf", "org/model", "", "refs/pr/1")),
        ("s3://bucket", Source("s3", "bucket")),
        ("s3://bucket/a/b/", Source("s3", "bucket", "a/b")),
    ],
)
def test_a_source_has_a_place_a_path_and_a_revision(source: str, parts: Source) -> None:
    assert parse_source(source) == parts


@pytest.mark.parametrize(
    "source",
    [
        "",
        "hf://model",
        "hf://org/model@",
        "hf://org/model/../x",
        "s3://",
        "s3://B",
        "s3://b-b/../other/x",
        "gs://b/x",
        "file:///x",
        "a\0b",
    ],
)
def test_other_sources_are_refused(source: str) -> None:
    with pytest.raises(InvalidSpec):
        parse_source(source)


@pytest.mark.parametrize(
    "path", ["", "/a", "a//b", "../a", "a/./b", "a/", "a\\b", "a\0", "a\n", "x" * 241, "a/" * 300 + "b"]
)
def test_a_file_cannot_leave_its_folder(path: str) -> None:
    with pytest.raises(InvalidSpec):
        WeightsFile(path, 1, _DIGEST)


@pytest.mark.parametrize(
    "fields",
    [
        {"size": -1},
        {"size": 1 << 63},
        {"digest": "x"},
        {"digest": ""},
        {"digest": "", "etag": "e" * 201},
        {"etag": "é"},
        {"etag": "a\nb"},
    ],
)
def test_a_file_has_a_size_and_an_identity(fields: dict[str, Any]) -> None:
    with pytest.raises((InvalidSpec, msgspec.ValidationError)):
        msgspec.convert({"path": "w", "size": 1, "digest": _DIGEST} | fields, WeightsFile)


@pytest.mark.parametrize(
    "fields",
    [
        {"files": ()},
        {"files": (WeightsFile("w", 1, _DIGEST), WeightsFile("w", 1, _OTHER))},
        {"files": (WeightsFile("w", 1, _DIGEST), WeightsFile("w/x", 1, _OTHER))},
        {"files": tuple(WeightsFile(f"{number}", 1, _DIGEST) for number in range(MAX_FILES + 1))},
        {"files": (WeightsFile("w", 1, etag="e"),)},
        {"files": (WeightsFile("a", LARGEST_INTEGER, _DIGEST), WeightsFile("b", 1, _OTHER))},
        {"files": (WeightsFile("a/w", 1, _DIGEST),), "is_file": True},
        {"source": "hf://org/model"},
        {"commit": "c" * 40},
    ],
)
def test_a_manifest_is_consistent(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpec):
        WeightsSpec(**{"source": "./weights", "files": (WeightsFile("w", 1, _DIGEST),)} | fields)


def test_equal_files_of_any_origin_have_one_address() -> None:
    a, b = WeightsFile("a", 1, _DIGEST), WeightsFile("b", 2, _OTHER)
    local, hub = _weights(a, b), _weights(b, a, source="hf://org/model", commit="c" * 40)
    assert local.digest == hub.digest
    assert _weights(a).digest != local.digest


def test_a_size_counts_equal_content_once() -> None:
    assert _weights(WeightsFile("a", 3, _DIGEST), WeightsFile("b", 3, _DIGEST), WeightsFile("c", 4, _OTHER)).size == 7


def test_without_a_sha256_the_place_and_the_etag_are_the_key() -> None:
    file = WeightsFile("w", 1, etag="e1")
    here, there = _weights(file, source="s3://bucket/a"), _weights(file, source="s3://bucket/b")
    again = _weights(WeightsFile("w", 1, etag="e2"), source="s3://bucket/a")
    assert len({here.digest, there.digest, again.digest}) == 3


def test_a_function_declares_a_source_once() -> None:
    check_weights([_weights(), _weights(include=("*.json",))])
    with pytest.raises(InvalidSpec):
        check_weights([_weights(), _weights()])
