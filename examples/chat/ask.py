"""Chat in the terminal, by OpenAI's client: python ask.py "question" """

from __future__ import annotations

import os
import sys

import openai


def main(question: str) -> None:
    url = os.environ.get("GPUFN_URL", "http://127.0.0.1:8090")
    client = openai.OpenAI(base_url=f"{url}/openai/v1", api_key=os.environ.get("GPUFN_API_KEY", "any"))
    chunks = client.chat.completions.create(
        model="parrot.chat", messages=[{"role": "user", "content": question}], stream=True
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
