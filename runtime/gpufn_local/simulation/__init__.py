"""A GPU on paper: what the orders of `gpufn_core.domain.gpu_fair_queue` make of a trace of calls. Pure, and the same for the same seed.

`python -m gpufn_local.simulation` is what `gpufn simulate` starts.
"""
