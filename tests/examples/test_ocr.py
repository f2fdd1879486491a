from __future__ import annotations

import io

import pytest

from tests.conftest import ROOT, Platform
from tests.examples.conftest import deploy

pytest.importorskip("rapidocr_onnxruntime", reason="OpenCV is too large for CI", exc_type=ImportError)
pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True, scope="module")
def deployed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The example with the packages of these tests instead of an environment of its own, which would be downloaded."""
    source = (ROOT / "examples" / "ocr" / "app.py").read_text()
    assert "image=RAPIDOCR, " in source
    folder = tmp_path_factory.mktemp("ocr")
    (folder / "app.py").write_text(source.replace("image=RAPIDOCR, ", ""))
    deploy(platform, folder, "PIL")


def test_an_uploaded_picture_becomes_lines_with_boxes(platform: Platform) -> None:
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (480, 160), "white")
    for row, text in enumerate(("INVOICE 2041", "Total: 12.50 EUR")):
        ImageDraw.Draw(picture).text((20, 20 + 70 * row), text, "black", ImageFont.load_default(36))
    with io.BytesIO() as file:
        picture.save(file, "PNG")
        upload = {"picture": ("receipt.png", file.getvalue(), "image/png")}
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
