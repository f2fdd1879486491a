"""Functions with images of their own."""

from gpufn import Image, gpu_function


@gpu_function(image=Image.python("3.11").pip_install("msgspec").add_file("greeting.txt", "/opt/greeting.txt"))
def greet() -> str:
    with open("/opt/greeting.txt") as file:
        return file.read().strip()


# The file makes it an image for containers, whose packages a deploy does not lock.
@gpu_function(
    image=Image.python("3.11")
    .pip_install("nosuch @ file:///nowhere/nosuch-1.0-py3-none-any.whl")
    .add_file("greeting.txt", "/opt/greeting.txt")
)
def never() -> str:
    return "it does not build"


@gpu_function(image=Image.from_name("gpufn-test-nothing:1"))
def no_base() -> str:
    return "there is no such image"
