"""The function that a rehearsal loads."""

from gpufn import gpu_function


@gpu_function()
def rehearse(x: int = 0) -> int:
    return x
