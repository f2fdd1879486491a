"""One agent per node: the only process that touches devices and processes.

It makes the node's workers match its Assignments.

    loop          watches, launches, ends; the only module that acts on workers
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
    bundles       the node's unpacked bundles
    devices/      what this node has
"""
