"""A predictor as it is written for Replicate's cog."""

import tempfile

import voice
from cog import BasePredictor, Input, Path


class Predictor(BasePredictor):  # type: ignore[misc]
    def setup(self) -> None:
        with open("greeting.txt", encoding="utf-8") as file:
            self.greeting = file.read().strip()

    def predict(
        self,
        name: str = Input(description="Whom to greet", max_length=10),
        times: int = Input(default=1, ge=1, le=3),
        tone: str = Input(default="calm", choices=["calm", "loud"]),
        suffix: Path | None = Input(default=None),  # noqa: B008  as in cog
    ) -> Path:
        text = " ".join([f"{self.greeting} {name}"] * times)
        if suffix is not None:
            text += suffix.read_text()
        out = Path(tempfile.mkdtemp()) / "out.txt"
        out.write_text(voice.say(text, tone))
        return out
