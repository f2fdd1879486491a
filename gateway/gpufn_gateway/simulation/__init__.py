"""A GPU on paper: what the orders of `gpufn.turns` make of a trace of calls. Pure, and the same for the same seed.

`python -m gpufn_gateway.simulation` is what `gpufn simulate` starts.
"""
