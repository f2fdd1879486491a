"""`python -m gpufn.deploy.convert FORMAT SOURCE ONNX OPTIONS`: write a model as ONNX.

A separate process, so that neither the CLI nor the builder imports torch, or a user's file that builds a model. A
failure is reported on the last line of standard error, with exit code 1.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from gpufn.deploy.convert.first_line import first_line
from gpufn.deploy.convert.formats import Format, split_factory
from gpufn.deploy.convert.options import ConvertOptions, decode
from gpufn_core.errors import GpufnError, InvalidSpec


def main(name: str, source: str, onnx: Path, options: ConvertOptions) -> None:
    format = Format(name)  # noqa: A001
    if (factory := split_factory(source)) is not None:
        from gpufn.deploy.convert import torch_factory  # noqa: PLC0415

        torch_factory.convert(*factory, onnx)
        return
    try:
        if format in (Format.TORCHSCRIPT, Format.TORCH_EXPORT):
            from gpufn.deploy.convert import torch_files  # noqa: PLC0415

            convert = torch_files.script if format is Format.TORCHSCRIPT else torch_files.exported_program
        else:
            from gpufn.deploy.convert import sklearn_files  # noqa: PLC0415

            convert = sklearn_files.convert
        convert(source, onnx, options)
    except GpufnError:
        raise
    except Exception as error:
        raise InvalidSpec(first_line(error)) from error


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), decode(sys.argv[4]))
    except GpufnError as error:
        if error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        sys.exit(error.message)
