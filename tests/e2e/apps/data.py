"""Functions with volumes: the test fills `shelf-read` before it deploys them."""

from __future__ import annotations

import os

from gpufn import Dict, Queue, Ref, Volume, gpu_function, put

READ = Volume("shelf-read")


@gpu_function(volumes=Volume("default/default/shelf-read"), isolation="process")
def read_as_process() -> list[str]:
    return sorted(os.listdir(Volume("default/default/shelf-read").path))


@gpu_function(volumes=READ)
def read_shelf() -> dict[str, object]:
    files = {
        path.relative_to(READ.path).as_posix(): [path.stat().st_size, os.access(path, os.X_OK)]
        for path in READ.path.rglob("*")
        if path.is_file()
    }
    return {"version": READ.version, "files": files}


WRITTEN = Volume("shelf-written", writable=True)


@gpu_function(volumes=WRITTEN)
def write_shelf(name: str, size: int = 1, remove: str = "") -> int:
    (WRITTEN.draft / "made").mkdir(exist_ok=True)
    (WRITTEN.draft / "made" / name).write_bytes(name.encode() * size)
    if remove:
        WRITTEN.remove(remove)
    return WRITTEN.commit()


@gpu_function(volumes=[READ, Volume("shelf-written", writable=True)])
def write_elsewhere() -> list[str]:
    errors = []
    for volume in (READ, Volume("shelf-read", writable=True), Volume("other", writable=True)):
        try:
            volume.draft.joinpath("a").write_text("a")
            volume.commit()
        except Exception as error:
            errors.append(type(error).__name__)
    (WRITTEN.draft / "link").symlink_to("/etc/passwd")
    try:
        WRITTEN.commit()
    except Exception as error:
        errors.append(type(error).__name__)
    return errors


JOBS = Queue("data-jobs", lease=1)
SEEN = Dict("data-seen")


@gpu_function
def work() -> dict[str, object]:
    done = []
    try:
        while True:
            with JOBS.get(timeout=0) as job:
                if SEEN.add(job, True) and job == "fails once":
                    raise ValueError(job)
                done.append(job)
    except ValueError:
        with JOBS.get(timeout=5) as job:
            done.append([job])
    except TimeoutError:
        pass
    return {"done": done, "left": len(JOBS), "seen": sorted(SEEN)}


@gpu_function
def take_from_another_app() -> str:
    try:
        Queue("prod/search/jobs").put(1)
    except Exception as error:
        return type(error).__name__
    return ""


@gpu_function
def total(numbers: Ref) -> list[int]:
    return [sum(numbers.get()), sum(numbers.get()), put((1, 2)).get()[1]]
