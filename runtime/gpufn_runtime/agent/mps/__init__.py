"""Sharing of GPUs by NVIDIA MPS: one control daemon per shared GPU, for as long as workers share it.

base            the agent's interface to MPS, independent of the MPS version
daemons         implementation for MPS v2: all control daemons of this node, checked every few seconds
daemon_factory  creates a GPU's daemon, and finds the daemons of an earlier agent
daemon          one GPU's control daemon: start, observation, restart, stop
control         commands to a control daemon, with a timeout
condition       meaning of the daemon's replies (pure)
client          environment that makes a worker a limited client (pure)
fault_attribution  which functions may have made a GPU fail, and which are quarantined (pure)
compute_mode    sets a GPU's compute mode so that only MPS can use it, and restores it
logs            size limit and last lines of the daemon's log files
"""
