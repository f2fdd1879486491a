"""Fake of `python -m gpufn_runtime.worker`, which follows the instructions in its entry point.

It imports nothing of gpufn, so it starts in 15 ms. `--template` behaves like the real one: double fork, own session,
one JSON line per answer.
"""

import json
import os
import signal
import sys
import time


def work(config_path: str) -> None:  # noqa: PLR0912 - one branch per way to behave
    with open(config_path) as file:
        config = json.load(file)
    for path in config["cgroup_procs"]:
        with open(path, "w") as procs:
            procs.write(str(os.getpid()))
    what, _, rest = config["spec"]["entry"]["qualname"].partition(" ")
    print(f"hello from {config['worker']}", flush=True)
    if what == "env":
        print("ENV " + json.dumps(dict(os.environ)), flush=True)
        print("CONFIG " + json.dumps(config), flush=True)
        print("CWD " + os.getcwd(), flush=True)
    elif what == "exit":
        print("last words", flush=True)
        os._exit(int(rest))
    elif what == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "eat":
        block = bytearray()
        while True:
            block += b"x" * (8 << 20)
    elif what == "child-eats":  # in case the kernel kills one process and not the group
        if os.fork() == 0:
            block = bytearray()
            while True:
                block += b"x" * (8 << 20)
        os.wait()
        print("the child is gone", flush=True)
    elif what == "flood":
        line = (b"y" * 99 + b"\n") * 1000
        for _ in range(int(rest)):
            os.write(1, line)
        print("flood over", flush=True)
        os._exit(0)
    elif what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("no", flush=True)
    elif what == "child":
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pause()
        os._exit(0)
    elif what == "runaway":  # a grandchild in a session of its own
        if os.fork() == 0:
            os.setsid()
            if (grandchild := os.fork()) == 0:
                signal.pause()
            print(f"runaway {grandchild}", flush=True)
            os._exit(0)
        os.wait()
        os._exit(0)
    elif what == "leaves-server":  # a program in a session of its own without output
        nothing = os.open("/dev/null", os.O_RDWR)
        redirected = [(os.POSIX_SPAWN_DUP2, nothing, at) for at in (0, 1, 2)]
        server = os.posix_spawn("/bin/sleep", ["sleep", "60"], os.environ, file_actions=redirected, setsid=True)
        print(f"server {server}", flush=True)
        os._exit(0)
    elif what == "chatty":
        while True:
            print("still here", flush=True)
            time.sleep(0.01)
    while True:
        signal.pause()


def template(modules: list[str]) -> None:
    if "hangs" in modules:
        print(json.dumps({"modules": modules}), flush=True)
        signal.pause()
    if "threads" in modules:
        print(
            json.dumps(
                {"modules": modules, "error": "importing threads started 4 threads", "refused_module": "threads"}
            ),
            flush=True,
        )
        return
    if "refuses" in modules:
        print(json.dumps({"modules": modules, "error": "importing other started 4 threads"}), flush=True)
        return
    answer = {"modules": [*modules, "numpy"] if "brings_numpy" in modules else modules}
    if "slow" in modules:
        with open("slow") as fifo:  # in the templates' folder; the test writes the rest of the answer
            answer |= json.load(fifo)
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        if line == "\n":
            continue
        request = json.loads(line)
        if "breaks" in modules:
            os._exit(1)
        if "says_no" in modules:
            print(json.dumps({"error": "no memory"}), flush=True)
            continue
        read, write = os.pipe()
        middle = os.fork()
        if middle == 0:
            os.setsid()
            pid = os.fork()
            if pid == 0:
                os.setsid()
                output = os.open(request["output"], os.O_RDWR)
                null = os.open("/dev/null", os.O_RDONLY)
                for source, target in ((null, 0), (output, 1), (output, 2)):
                    os.dup2(source, target)
                os.closerange(3, 64)
                os.chdir(os.path.dirname(request["config"]))
                os.environ.clear()
                os.environ.update(request["env"])
                try:
                    work(request["config"])
                finally:
                    os._exit(9)
            os.write(write, str(pid).encode())
            os._exit(0)
        os.waitpid(middle, 0)
        pid = int(os.read(read, 20))
        os.close(read)
        os.close(write)
        print(json.dumps({"pid": pid}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--template":
        template(sys.argv[2:])
    else:
        work(sys.argv[1])
