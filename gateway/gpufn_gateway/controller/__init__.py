"""Leader-leased autoscaler: how many workers, and where. One controller per gateway process; only the leader acts.

execute, loop, reports  run actions, watch and step, publish status; these and arrival_store use the bus
arrival_store           the history of arrivals, stored for pre-warming
limits, store_health    how far devices may be promised; whether NATS stores the decisions
decide/                 one step as a pure function, and the statuses that follow from it
    scaling/            how many workers: demand, policy, forecast of calls, circuit breaker, rollout
    room/               who gets room: shares, preemption, parking, moves, scale-down
placement/              the node and GPUs for a worker, or the reason why there is no room
state/                  the world as reported, joined: workers, nodes, revisions, backlogs, leases
"""
