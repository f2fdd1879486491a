"""What a machine with a GPU can do under gpufn, tried and measured: `scripts/gpu-check`.

environment  which Python runs the check, with carried wheels where the machine lacks packages; bundle collects those
machine      what is there, and what a step needs of it; mps: whether its daemons start
steps        the list of steps; each runs in a process of its own, within its time
checks/      the steps themselves, by topic; findings is what they say
report, page what is written: JSON, Markdown, one HTML page
"""
