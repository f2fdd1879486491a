"""GPU check: what a machine with a GPU can do under gpufn, tested and measured. Run by `scripts/gpu-check`.

environment  the Python that runs the check, with bundled wheels where packages are missing; bundle collects the wheels
machine      the machine's devices and packages, and what a step requires of them; mps: whether MPS daemons start
steps        run the list of steps, each in a process of its own with a time limit
checks/      the steps themselves, by topic; findings has their results
report, page the report as JSON, Markdown and one HTML page
"""
