"""Shares of GPUs by MPS: a control daemon for each GPU that workers share, while they do.

base          what the agent asks of MPS, whichever of its interfaces the driver has
daemons       the first interface (v2): all daemons of this node, looked at every few seconds
maker         which daemon a GPU gets, and those that an earlier agent has left
daemon        one GPU's control daemon: started, asked, restarted, stopped
control       one question to a control daemon, with a time-out
condition     what the answers mean (pure)
client        what makes a worker a client, within its limits (pure)
suspects      whose code may have brought a GPU down, and who has done so too often (pure)
compute_mode  a GPU that takes nobody but its daemon; as it was before, afterwards
"""
