"""Node agent: the only process on a node that manages its devices and worker processes.

The agent makes the node's workers match the node's Assignments.

    loop          main loop: watches the bus, and applies the actions that `decide` returns
    decide/       pure decisions: which workers to start, stop and adopt; which templates to keep
    workers/      worker processes: configuration, start, supervision, output, takeover, cleanup
    launchers/    how a worker process is created: forked from a template, as a fresh interpreter, or in a container
    bytecode/     byte code of bundles, compiled by the agent
    cache/        bundles, engines, weights and container images on this node's disk; prefetch of deployed revisions
    devices/      this node's devices and their health
    egress/       networks of workers that reach the internet and nothing else
    mps/          GPUs that workers share through NVIDIA MPS
    options       the records that an agent reads, and its options
    reports       node reports, worker events and raw output, sent to the bus
    clock_check   skew between this node's clock and the NATS server's
    settings      environment variables
"""
