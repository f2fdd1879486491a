"""A function with weights beside this file."""

import os

from gpufn import Weights, gpu_function

WEIGHTS = Weights("greeting.txt")


@gpu_function(weights=WEIGHTS)
def weigh() -> dict[str, object]:
    with open(WEIGHTS.path) as file:
        text = file.read()
    try:
        os.chmod(WEIGHTS.path, 0o666)
    except OSError as error:
        return {"text": text, "links": os.stat(WEIGHTS.path).st_nlink, "chmod": type(error).__name__}
    return {"text": text, "chmod": "done"}
