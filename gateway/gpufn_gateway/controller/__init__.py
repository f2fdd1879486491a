"""Leader-leased autoscaler: how many workers, and where. One controller per gateway process; only the leader acts.

execute, loop, reports  the only modules here that use the bus: run actions, watch and step, publish status
limits, store_health    how far devices may be promised; whether NATS stores the decisions
decide/                 one step as a pure function: policy, circuit breaker, rollout, parking, preemption, status
placement/              the node and GPUs for a worker, or the reason why there is no room
state/                  the world as reported, joined: workers, nodes, revisions, backlogs, leases
"""
