"""One agent per node: the only process that touches devices and processes.

It makes the node's workers match its Assignments.

    loop          watches, steps, and acts on what `reconcile` says
    inheritance   what an earlier agent left
    launches      from an Assignment to a process: what it is to be (orders), its folder, its memory group
    running       the workers whose processes run: signals, output, ends
    parking       parked workers, until it is proven what they hold (proofs)
    burials       what ended workers leave is removed
    reports       what the agent says: reports, events, raw output
    preparation   what is deployed: its bundles unpacked and its templates asked for, before the first call
    fleet         what runs here, and what the bus wants to run here
    reconcile     the difference between the two, as actions (pure)
    launchers/    how a worker's process comes to be: forked from a standby template, or a cold interpreter
    standbys      which templates are worth their memory (pure)
    folders       a worker's folder; what a later agent needs to adopt it
    processes     pidfds, groups, exit statuses, descendants
    cgroups       memory limits, and who was killed for them
    output        a worker's raw output: its tail and its log lines, both bounded
    bundles, engines, images  what the node keeps of bundles, engines and containers' images
    devices/      what this node has, and how it is
    mps/          GPUs that are shared in parts
"""
