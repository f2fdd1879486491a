"""Simulation of a GPU: compares the orders of `gpufn_core.domain.devices.gpu_fair_queue` on a trace of calls.

Pure. The result depends only on the options and the seed.

`gpufn simulate` runs `python -m gpufn_local.simulation`.
"""
