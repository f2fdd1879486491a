"""Stream a WAV file as fast as a microphone would, and print the text: python client.py speech.wav"""

from __future__ import annotations

import json
import sys
import threading
import time
import wave
from collections.abc import Iterator

from websockets.sync.client import ClientConnection, connect

from gpufn import Client

_RATE = 16_000  # samples per second


def main(path: str) -> None:
    with Client() as platform:
        address = f"ws{platform.url.removeprefix('http')}/web/default/default/live/listen"
    pieces = list(_pieces(path))
    with connect(address) as socket:
        threading.Thread(target=_send, args=(socket, pieces), daemon=True).start()
        for message in socket:
            event = json.loads(message)
            if event["type"] == "text":
                print(f"{event['start']:6.2f} s to {event['end']:6.2f} s  {event['text']}")


def _pieces(path: str) -> Iterator[bytes]:
    """Yield the samples of a file, in pieces of a tenth of a second."""
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (_RATE, 1, 2):
            raise SystemExit(f"{path} is not 16-bit mono of 16 kHz: ffmpeg -i {path} -ac 1 -ar {_RATE} out.wav")
        while piece := file.readframes(_RATE // 10):
            yield piece


def _send(socket: ClientConnection, pieces: list[bytes]) -> None:
    for piece in pieces:
        socket.send(piece)
        time.sleep(0.1)  # as a microphone would
    socket.send(b"")


if __name__ == "__main__":
    main(*sys.argv[1:])
