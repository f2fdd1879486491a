"""Stream a WAV file as fast as a microphone would, and print the text: python client.py speech.wav"""

from __future__ import annotations

import json
import sys
import threading
import time
import wave

from websockets.sync.client import ClientConnection, connect

from gpufn import Client

_PIECE_S = 0.1


def main(path: str) -> None:
    with Client() as platform:
        address = f"ws{platform.url.removeprefix('http')}/web/default/default/live/listen"
    with connect(address) as socket:
        threading.Thread(target=_send, args=(socket, path), daemon=True).start()
        for message in socket:
            event = json.loads(message)
            if event["type"] == "text":
                print(f"{event['start']:6.2f} s to {event['end']:6.2f} s  {event['text']}")


def _send(socket: ClientConnection, path: str) -> None:
    with wave.open(path) as file:
        if (file.getframerate(), file.getnchannels(), file.getsampwidth()) != (16_000, 1, 2):
            raise SystemExit(f"{path} has to be 16-bit mono of 16 kHz: ffmpeg -i {path} -ac 1 -ar 16000 out.wav")
        while piece := file.readframes(round(_PIECE_S * file.getframerate())):
            socket.send(piece)
            time.sleep(_PIECE_S)
    socket.send(b"")


if __name__ == "__main__":
    main(*sys.argv[1:])
