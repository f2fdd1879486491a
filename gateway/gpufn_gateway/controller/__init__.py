"""How many workers, where. One controller per gateway process; the one that holds the lease acts.

window, policy   what was seen, and how many workers that asks for
circuit          when to stop starting what fails to start
rollout          from one revision to the next
placement, leases  where a worker can run, and what is taken
views, world     what is known of workers, nodes and revisions, joined
plan             one step of the whole as a pure function
actions, room, status  what it comes to, where the room for it comes from, what it tells
loop             the only module here that knows the bus: hears, steps, acts
"""
