"""Chat in the terminal, by OpenAI's client: python ask.py "question" """

from __future__ import annotations

import os
import sys

import openai

import gpufn


def main(question: str) -> None:
    with gpufn.Client() as platform:
        url = platform.url  # GPUFN_URL, or the platform on this machine
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
