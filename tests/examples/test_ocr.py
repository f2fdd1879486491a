from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy, imported

FOLDER = ROOT / "examples" / "ocr"
RECEIPT = ["CORNER BOOKSHOP", "2 notebooks 7.00", "1 fountain pen 18.50", "Total EUR 25.50"]


@pytest.fixture(scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example with the packages of these tests instead of an environment of its own, which would be downloaded."""
    pytest.importorskip("rapidocr_onnxruntime", reason="OpenCV is too large for CI", exc_type=ImportError)
    source = (FOLDER / "app.py").read_text()
    assert "image=RAPIDOCR, " in source
    folder = tmp_path_factory.mktemp("ocr")
    (folder / "app.py").write_text(source.replace("image=RAPIDOCR, ", ""))
    deploy(platform, folder, "PIL")


@pytest.mark.e2e
@pytest.mark.usefixtures("deployed")
def test_an_uploaded_picture_becomes_lines_with_boxes(platform: Platform) -> None:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (480, 160), "white")
    for row, text in enumerate(("INVOICE 2041", "Total: 12.50 EUR")):
        ImageDraw.Draw(picture).text((20, 20 + 70 * row), text, "black", ImageFont.load_default(36))
    upload = {"picture": ("receipt.png", _file(picture), "image/png")}
    path = "/web/default/default/ocr/"
    answer = platform.client.post(path, files=upload, data={"min_score": "0.5"})
    assert answer.status_code == 200, answer.text
    first, second = answer.json()
    assert [line["text"].replace(" ", "") for line in (first, second)] == ["INVOICE2041", "Total:12.50EUR"]
    for line, top in ((first, 20), (second, 90)):
        assert len(line["box"]) == 4
        assert all(0 <= x <= 480 and top - 10 <= y <= top + 60 for x, y in line["box"])
    assert platform.client.post(path, files=upload, data={"min_score": "1.1"}).json() == []
    assert platform.client.post(path, files={"picture": ("a.txt", b"text")}).json()["code"] == "function_raised"


@pytest.mark.e2e
@pytest.mark.usefixtures("deployed")
def test_the_receipt_of_the_readme_is_read(platform: Platform) -> None:
    upload = {"picture": ("receipt.png", (FOLDER / "receipt.png").read_bytes())}
    lines = platform.client.post("/web/default/default/ocr/", files=upload).json()
    assert "".join(line["text"] for line in lines).replace(" ", "") == "".join(RECEIPT).replace(" ", "")


def test_a_picture_with_a_palette_reaches_the_model_in_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: RapidOCR took the numbers of the palette for shades of gray, and found no text."""
    from PIL import Image

    picture = Image.new("RGB", (8, 8), (250, 240, 230)).quantize(2)
    assert (picture.mode, picture.getpixel((0, 0))) == ("P", 0)
    (seen,), lines = _read(monkeypatch, _file(picture), found=None)
    assert (seen.mode, seen.getpixel((0, 0))) == ("RGB", (250, 240, 230))
    assert lines == []


def test_a_photo_is_turned_as_its_camera_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ExifTags, Image

    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # turn it by 90 degrees
    (seen,), _ = _read(monkeypatch, _file(Image.new("RGB", (40, 20)), exif=exif), found=None)
    assert seen.size == (20, 40)


def test_uncertain_lines_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    box = [[1.04, 2.0], [3.0, 2.0], [3.0, 4.0], [1.0, 4.0]]
    found = [[box, "certain", 0.98765], [box, "a guess", 0.4]]
    _, lines = _read(monkeypatch, _file(Image.new("L", (8, 8))), found)
    assert [(line.text, line.score, line.box[0]) for line in lines] == [("certain", 0.988, [1.0, 2.0])]


def _read(monkeypatch: pytest.MonkeyPatch, picture: bytes, found: Any) -> tuple[list[Any], Any]:
    """Call `ocr` here, with a stand-in for RapidOCR that finds `found`. Returns the pictures that it saw, and the
    lines."""
    seen: list[Any] = []
    package: Any = ModuleType("rapidocr_onnxruntime")

    def engine(image: Any) -> tuple[Any, None]:
        seen.append(image)
        return found, None

    package.RapidOCR = lambda: engine
    monkeypatch.setitem(sys.modules, "rapidocr_onnxruntime", package)
    with imported(FOLDER, "app") as app:
        return seen, app.ocr(picture)


def _file(picture: Any, **options: Any) -> bytes:
    with io.BytesIO() as file:
        picture.save(file, "PNG", **options)
        return file.getvalue()
