"""Runner, one per node: pulls deliveries for the node's workers, runs and settles them, and extends their leases.

core/capacity.py        chooses the worker for a call: the least busy one of the node
core/machine.py         decides what happens to a call; core/end_rules.py decides whether it runs again
core/busy_time.py       divides a worker's time among its calls, which `Attempt.gpu_s` turns into GPU seconds
dispatch/               receives calls, from the queues and by the fast path of a gateway on the same host
attempts/settle.py      sends the reply or stores the record, then acknowledges
workers/                the sockets of the workers
recovery/               calls of an earlier runner, and of callers that are gone
gpu/                    turns on a GPU that functions share by time, and the energy of calls
"""
