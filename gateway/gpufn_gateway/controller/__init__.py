"""How many workers, where. One controller per gateway process; the one that holds the lease acts.

window, policy  what was seen, and how many workers that asks for
circuit          when to stop starting what fails to start
rollout          from one revision to the next
request, placement, gpus, leases  what a worker asks for, where it can run, on which GPUs, and what is taken
parking, holdings, host_memory  who is parked rather than ended, and what the parked hold
views, depths, world  what is known of workers, nodes, revisions and their calls, joined
plan             one step of the whole as a pure function
actions, room, shortage, status  what it comes to, where the room for it comes from, why there is none, what it tells
loop, acts, reports  the only modules here that know the bus: hear and step; do what a step decided; tell of it
"""
