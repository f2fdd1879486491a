"""Command line of a worker: `python -m gpufn_runtime.worker ARGUMENTS`.

CONFIG.json                     a worker
--within PYTHON CONFIG.json     a worker in the environment of PYTHON, confined before that Python starts
--confined CONFIG.json          the second half of it: this is that Python
--template MODULE...            a template process, which workers are forked from
--contained MODULE...           the first process of a container
--prove-cuda                    a process that proves CUDA
"""

from __future__ import annotations

import sys

from gpufn_core.protocol.launch import CONFINED, CONTAINED, PROVE_CUDA, WITHIN


def main(arguments: list[str]) -> int:  # noqa: RET503  (`run_worker` does not return)
    if not sys.flags.safe_path:
        del sys.path[0]  # the agent's folder, which `-m` put there; user modules are imported from their bundle
    if arguments[:1] == ["--template"]:
        from gpufn_runtime.worker.template import serve  # noqa: PLC0415  (a cold worker does not need it)

        return serve(arguments[1:])
    if arguments[:1] == [CONTAINED]:
        from gpufn_runtime.worker.container_init import run_container  # noqa: PLC0415

        run_container(arguments[1:])
    if arguments == [PROVE_CUDA]:
        from gpufn_runtime.worker.gpu import cuda_proof  # noqa: PLC0415

        return cuda_proof.main()
    if arguments[:1] == [WITHIN] and len(arguments) == 3:
        from gpufn_runtime.worker.confined import run_within  # noqa: PLC0415

        run_within(arguments[1], arguments[2])
    if arguments[:1] == [CONFINED] and len(arguments) == 2:
        from gpufn_runtime.worker.lifecycle import run_worker  # noqa: PLC0415

        run_worker(arguments[1], is_confined=True)
    if len(arguments) != 1:
        usage = (
            "usage: python -m gpufn_runtime.worker [--within PYTHON] CONFIG.json | --template|--contained MODULE... | "
            "--prove-cuda"
        )
        print(usage, file=sys.stderr)  # noqa: T201
        return 2
    from gpufn_runtime.worker.lifecycle import run_worker  # noqa: PLC0415

    run_worker(arguments[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
