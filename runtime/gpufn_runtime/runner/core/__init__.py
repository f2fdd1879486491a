"""The state machine of one Revision's calls on a node. Pure: events and the time in, actions out.

machine       handles one event
attempt       the states of an attempt, and their transitions
ends          ends an attempt and charges it; end_rules is the table that decides every retry
lost_workers  keeps the attempts of lost workers until their processes are dead

`dispatch/revision_queue.py` feeds the machine and executes its actions.
"""
