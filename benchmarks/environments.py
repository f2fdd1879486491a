"""Creation of a function's environment against uv itself: `python benchmarks/environments.py`.

The packages come from the index once, into a folder of wheels, so that no network is measured. Cold: an empty cache of
uv. Cached: uv has the packages unpacked in its cache. Both of ours include bytecode, verification and the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpufn.deploy.package_lock import lock, this_python
from gpufn_core.find_uv import find_uv
from gpufn_core.ids import digest_of
from gpufn_core.spec.image_spec import FILES_FOLDER, ImageSpec
from gpufn_runtime.agent.environments.build import Confinement, Limits
from gpufn_runtime.agent.environments.cache import EnvironmentCache
from gpufn_runtime.agent.workers.cgroups import MemoryGroups

PACKAGES = ("numpy==2.3.5", "pillow==12.0.0")
ROUNDS = 3


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gpufn-bench-") as name:
        folder = Path(name)
        wheels = folder / "wheels"
        needs = [*PACKAGES, "msgspec", "cloudpickle"]
        pip = [sys.executable, "-m", "pip", "download", "-q", "--only-binary", ":all:", "-d", os.fspath(wheels)]
        subprocess.run([*pip, *needs], check=True)
        os.environ |= {"UV_OFFLINE": "1", "UV_FIND_LINKS": os.fspath(wheels), "UV_CACHE_DIR": os.fspath(folder / "c")}
        data = lock(PACKAGES, python=this_python(), machine=platform.machine())
        locked = folder / "bundle" / FILES_FOLDER / digest_of(data)
        locked.parent.mkdir(parents=True)
        locked.write_bytes(data)
        spec = ImageSpec(python=this_python(), pip=PACKAGES, locked=locked.name, machine=platform.machine())
        rows: dict[str, Callable[[], None]] = {
            "uv": lambda: by_uv(folder, locked),
            "uv, with bytecode": lambda: by_uv(folder, locked, "--compile-bytecode"),
            "gpufn": lambda: by_gpufn(folder, spec, None),
            "gpufn in a sandbox": lambda: by_gpufn(folder, spec, Confinement((), namespaces=True)),
        }
        print("| made by | cold | cached |\n|---|---|---|")
        for label, make in rows.items():
            print(f"| {label} | {seconds(folder, make, is_cold=True)} | {seconds(folder, make, is_cold=False)} |")


def seconds(folder: Path, make: Callable[[], None], *, is_cold: bool) -> str:
    times = []
    for _ in range(ROUNDS):
        if is_cold:
            for cache in ("c", "python/uv"):
                shutil.rmtree(folder / cache, ignore_errors=True)
        for made in ("venv", "python/environments"):
            shutil.rmtree(folder / made, ignore_errors=True)
        started = time.perf_counter()
        make()
        times.append(time.perf_counter() - started)
    return f"{statistics.median(times):.2f} s"


def by_uv(folder: Path, locked: Path, *options: str) -> None:
    uv, venv = find_uv() or "uv", os.fspath(folder / "venv")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, venv], check=True)
    install = [uv, "pip", "install", "-q", "--require-hashes", "--python", f"{venv}/bin/python", *options]
    subprocess.run([*install, "-r", os.fspath(locked)], check=True)


def by_gpufn(folder: Path, spec: ImageSpec, confinement: Confinement | None) -> None:
    cache = EnvironmentCache(
        folder / "python",
        packages=folder,
        find_uv=find_uv,
        environ=os.environ,
        confinement=confinement,
        build_limits=Limits(4 << 30, 4 << 30, MemoryGroups(None)),
    )
    asyncio.run(cache.get(spec, os.fspath(folder / "bundle"), lambda line: None))


if __name__ == "__main__":
    main()
