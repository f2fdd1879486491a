"""The files of weights at deploy: on disk, in a hub and in a bucket."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufn.declare.weights import Weights
from gpufn.deploy.weights import files as weights_files
from gpufn.deploy.weights.files import prepare
from gpufn_core.errors import ArtifactUnavailable, InvalidSpec
from gpufn_core.spec import weights_spec
from gpufn_core.spec.weights_spec import WeightsSpec
from tests.weights_origins import COMMIT, Origins, running_origins, sha256

_FILES = {
    "config.json": b"{}",
    "model.bin": b"large enough to be in the large file storage",
    "fp16/model.bin": b"another one that is in the large file storage",
    "fp16-old/model.bin": b"x",
    ".gitattributes": b"hidden",
}


@pytest.fixture
def origins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Origins]:
    with running_origins(_FILES) as running:
        for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, text in running.environ().items():
            monkeypatch.setenv(name, text)
        yield running


def _sizes(spec: WeightsSpec) -> dict[str, int]:
    return {file.path: file.size for file in spec.files}


def _weights(tmp_path: Path, **files: bytes) -> Path:
    folder = tmp_path / "weights"
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def test_a_local_folder_is_hashed(tmp_path: Path) -> None:
    folder = _weights(tmp_path, a_bin=b"aa", sub__b_bin=b"b", _hidden=b"")
    spec, paths = prepare(Weights(str(folder)))
    assert _sizes(spec) == {"a.bin": 2, "sub/b.bin": 1}
    assert paths == {sha256(b"aa"): folder / "a.bin", sha256(b"b"): folder / "sub/b.bin"}
    assert not spec.is_file


def test_a_local_file_is_weights_too(tmp_path: Path) -> None:
    spec, _ = prepare(Weights(str(_weights(tmp_path, a_bin=b"aa") / "a.bin")))
    assert (spec.is_file, _sizes(spec)) == (True, {"a.bin": 2})


def test_patterns_select_files(tmp_path: Path) -> None:
    folder = _weights(tmp_path, a_bin=b"1", a_json=b"2", sub__b_bin=b"3")
    assert _sizes(prepare(Weights(str(folder), include=["*.bin"], exclude=["sub/*"])).spec) == {"a.bin": 1}
    with pytest.raises(InvalidSpec):
        prepare(Weights(str(folder), include=["*.safetensors"]))


def test_a_link_is_followed(tmp_path: Path) -> None:
    folder = _weights(tmp_path, a_bin=b"aa")
    (folder / "link.bin").symlink_to(folder / "a.bin")
    assert _sizes(prepare(Weights(str(folder))).spec) == {"a.bin": 2, "link.bin": 2}


@pytest.mark.parametrize("target", [".", "sub"])
def test_a_link_to_a_folder_above_is_not_followed(tmp_path: Path, target: str) -> None:
    folder = _weights(tmp_path, a_bin=b"aa", sub__b_bin=b"b")
    (folder / "sub/again").symlink_to(folder / target)
    (folder / "other").symlink_to(folder / "sub")
    sizes = _sizes(prepare(Weights(str(folder))).spec)
    assert sizes == {"a.bin": 2, "sub/b.bin": 1, "other/b.bin": 1}


def test_a_path_that_is_not_a_file_is_refused_unless_it_is_excluded(tmp_path: Path) -> None:
    folder = _weights(tmp_path, a_bin=b"aa")
    (folder / "broken").symlink_to(folder / "absent")
    os.mkfifo(folder / "pipe")
    for exclude in (["pipe"], ["broken"]):
        with pytest.raises(InvalidSpec):
            prepare(Weights(str(folder), exclude=exclude))
    assert _sizes(prepare(Weights(str(folder), exclude=["broken", "pipe"])).spec) == {"a.bin": 2}


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(weights_files, "file_of", refuse)
    with pytest.raises(InvalidSpec, match=r"a\.bin"):
        prepare(Weights(str(_weights(tmp_path, a_bin=b"aa"))))


def test_files_are_counted_before_they_are_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _weights(tmp_path, a_bin=b"1", b_bin=b"2")
    hashed: list[Path] = []
    monkeypatch.setattr(weights_spec, "MAX_FILES", 1)
    monkeypatch.setattr(weights_files, "file_of", hashed.append)
    with pytest.raises(InvalidSpec):
        prepare(Weights(str(folder)))
    assert not hashed


@pytest.mark.parametrize("data", [b"", b"version https://git-lfs.github.com/spec/v1"])
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidSpec, match=r"model\.safetensors"):
        prepare(Weights(str(_weights(tmp_path, model_safetensors=data))))


def test_an_absent_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec):
        prepare(Weights(str(tmp_path / "absent")))


def test_a_repository_is_pinned_to_its_commit(origins: Origins) -> None:
    spec, paths = prepare(Weights("hf://org/model"))
    expected = {name: sha256(data) for name, data in _FILES.items() if not name.startswith(".")}
    assert {file.path: file.digest for file in spec.files} == expected
    assert (spec.commit, paths) == (COMMIT, {})
    assert origins.downloads("model.bin") == origins.downloads("fp16-old/model.bin"), "only small files are read"


def test_a_folder_of_a_repository(origins: Origins) -> None:
    spec = prepare(Weights("hf://org/model/fp16")).spec
    assert list(_sizes(spec)) == ["model.bin"]
    assert spec.origin_path(spec.files[0]) == "fp16/model.bin"


def test_a_file_of_a_repository(origins: Origins) -> None:
    spec = prepare(Weights("hf://org/model/fp16/model.bin")).spec
    assert (spec.is_file, list(_sizes(spec)), spec.origin_path(spec.files[0])) == (
        True,
        ["model.bin"],
        "fp16/model.bin",
    )


def test_a_token_is_sent(origins: Origins, monkeypatch: pytest.MonkeyPatch) -> None:
    origins.token = "hf_x"
    with pytest.raises(InvalidSpec, match="HF_TOKEN"):
        prepare(Weights("hf://org/model"))
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert prepare(Weights("hf://org/model")).spec.commit == COMMIT


def test_a_list_that_continues_elsewhere_gets_no_token(origins: Origins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    origins.next_page = origins.url.replace("127.0.0.1", "localhost")
    prepare(Weights("hf://org/model"))
    sent = [headers.get("authorization") for _, path, headers in origins.requests if "/tree/" in path]
    assert sent == ["Bearer hf_x", None]


def test_a_redirect_of_s3_is_not_followed(origins: Origins, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, "x")
    origins.redirects_to = origins.url.replace("127.0.0.1", "localhost")
    with pytest.raises(ArtifactUnavailable, match="AWS_REGION"):
        prepare(Weights("s3://bucket"))
    assert len(origins.requests) == 1


@pytest.mark.parametrize(
    "source", ["hf://org/other", "hf://org/model@other", "hf://org/model/absent", "s3://bucket/absent"]
)
def test_a_file_missing_at_the_origin_is_refused(origins: Origins, source: str) -> None:
    with pytest.raises(InvalidSpec):
        prepare(Weights(source))


def test_an_origin_that_is_away_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    for source in ("hf://org/model", "s3://bucket"):
        with pytest.raises(ArtifactUnavailable):
            prepare(Weights(source))


def test_a_bucket_pins_files_by_etag(origins: Origins, monkeypatch: pytest.MonkeyPatch) -> None:
    origins.keys = "key"
    with pytest.raises(InvalidSpec, match="AWS"):
        prepare(Weights("s3://bucket/fp16"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    (file,) = prepare(Weights("s3://bucket/fp16")).spec.files
    assert (file.path, file.size, file.digest) == ("model.bin", len(_FILES["fp16/model.bin"]), "")
    assert file.etag


def test_a_bucket_may_know_the_sha256(origins: Origins) -> None:
    origins.with_sha256 = True
    spec = prepare(Weights("s3://bucket/fp16/model.bin")).spec
    assert (spec.is_file, spec.files[0].digest) == (True, sha256(_FILES["fp16/model.bin"]))
    assert len(prepare(Weights("s3://bucket")).spec.files) == 4, "in pages, without the hidden file"
