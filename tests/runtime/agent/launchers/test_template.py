"""Workers forked from templates, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from gpufn_core.domain.devices.device import Device, DeviceType
from gpufn_core.domain.worker import WorkerState
from gpufn_core.protocol import subjects
from gpufn_core.protocol.codec import encode
from gpufn_core.protocol.reports import RunnerReport, WorkerReport
from gpufn_core.spec.resources import Resources
from gpufn_runtime.agent.decide.template_choice import Use
from gpufn_runtime.agent.launchers.process import ProcessLauncher
from gpufn_runtime.agent.launchers.template import TemplateLauncher
from tests.waiting import until_async

GPU = Device("GPU-7", DeviceType.GPU, "NVIDIA L4", 24 << 30)


DATA = '"HF_HOME":"/data"'


def environment_of(pid: int) -> list[str]:
    """Return the process's initial environment; a fork has its parent's."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def imports_with(pid: int, text: str) -> bool:
    """Return whether a template, or one that a worker was forked from, set this text in its sandbox."""
    return any(each.startswith("GPUFN_TEMPLATE_ENV=") and text in each for each in environment_of(pid))


async def settled(node: Any) -> None:
    """Wait until the templates of the deployed functions are ready."""
    await node.until(lambda: any(report.templates for report in node.reports))
    await node.launcher.settled()


def test_a_worker_is_forked_from_the_empty_template(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("env")
        await node.start(templates=1)
        await settled(node)
        worker = await node.assign(gpu="GPU-7")
        event = await node.event(worker, "started")
        assert event.cold_start.standby is True
        assert '"CUDA_VISIBLE_DEVICES": "GPU-7"' in await node.line("ENV ")
        assert await node.line("CWD ") == f"CWD {node.home.worker(worker)}"
        assert os.getpgid(await node.pid(worker)) == await node.pid(worker)

    on_node(run)


def test_a_forked_worker_is_reaped_with_its_exit_code(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("exit 5")
        await node.start(templates=1)
        await settled(node)
        worker = await node.assign()
        event = await node.event(worker, "exited")
        assert (event.exit.code, event.exit.tail.splitlines()[-1]) == (5, "last words")
        await node.until_deleted(worker)

    on_node(run)


def test_forked_workers_outlive_templates_and_agent(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("chatty")
        await node.start(templates=1)
        await settled(node)
        worker = await node.assign()
        pid = await node.pid(worker)
        await node.line("still here")
        await node.vanish()
        node.lines.clear()
        node.reports.clear()
        await node.start(templates=0)
        await node.line("still here")
        os.kill(pid, signal.SIGKILL)
        event = await node.event(worker, "exited")
        assert event.exit.signal in (signal.SIGKILL, None)
        assert event.exit.code is None

    on_node(run)


def test_a_revision_gets_a_template_for_its_modules(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(modules=("numpy", "json"))
        await node.start(templates=2)
        report = await node.until(lambda: [r for r in node.reports if len(r.templates) == 2])
        assert report[0].templates == ("", "json,numpy")
        worker = await node.assign()
        assert (await node.event(worker, "started")).cold_start.standby is True

    on_node(run)


def test_modules_are_imported_with_the_variables_of_the_function_that_they_are_for(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("env", modules=("numpy",), env={"HF_HOME": "/data"})
        await node.start(templates=2)
        await settled(node)
        (imported_with,) = (environment_of(pid) for pid in node.launcher.pids if imports_with(pid, DATA))
        assert "CUDA_VISIBLE_DEVICES=" in imported_with
        assert "HF_HOME=/data" not in imported_with, "it is set inside the sandbox"
        worker = await node.assign()
        assert (await node.event(worker, "started")).cold_start.standby is True
        await node.line("ENV ")
        assert imports_with(await node.pid(worker), DATA)

    on_node(run)


def test_a_worker_sees_no_variables_of_another_functions_imports(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("env", modules=("numpy",), env={"HF_TOKEN": "theirs"})
        await node.start(templates=2)
        await settled(node)
        await node.deploy("env", number=2, modules=("numpy",), env={"HF_TOKEN": "mine"})
        worker = await node.assign(revision=2)
        assert '"HF_TOKEN": "mine"' in await node.line("ENV ")
        assert "theirs" not in "".join(environment_of(await node.pid(worker)))

    on_node(run)


def test_the_modules_of_a_gpu_function_are_imported_with_the_gpus_visible(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("env", modules=("numpy",), resources=Resources(gpu=("any",)))
        await node.start(templates=2, gpus=(GPU,))
        await settled(node)
        (imported_with,) = (e for e in map(environment_of, node.launcher.pids) if "CUDA_VISIBLE_DEVICES=" not in e)
        assert "PYTORCH_NVML_BASED_CUDA_CHECK=1" in imported_with
        worker = await node.assign(gpu="GPU-7")
        assert (await node.event(worker, "started")).cold_start.standby is True
        environment = await node.line("ENV ")
        assert '"CUDA_VISIBLE_DEVICES": "GPU-7"' in environment
        assert "PYTORCH_NVML" not in environment
        assert "CUDA_VISIBLE_DEVICES=" not in environment_of(await node.pid(worker))

    on_node(run)


def test_a_module_that_forbids_forks_is_left_to_the_workers(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(modules=("numpy", "threads"))
        await node.start(templates=3)
        await settled(node)
        assert node.launcher.templates == ("", "numpy")
        worker = await node.assign()
        started = await node.event(worker, "started")
        assert started.cold_start.standby is True
        assert "threads" in started.refused_modules
        await node.deploy(number=2, modules=("numpy",))
        worker = await node.assign(revision=2)
        assert (await node.event(worker, "started")).refused_modules == ""

    on_node(run)


def test_a_template_that_names_no_module_of_its_own_is_ended(on_node: Any) -> None:
    """A loop of creations would take a core for ever."""

    async def run(node: Any) -> None:
        await node.deploy(modules=("refuses",))
        await node.start(templates=3)
        await settled(node)
        assert node.launcher.templates == ("",)
        worker = await node.assign()
        assert (await node.event(worker, "started")).cold_start.standby is True  # from the empty one

    on_node(run)


def test_a_template_follows_the_reported_imports_of_workers(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(templates=2)
        await settled(node)
        report = WorkerReport("w-1", node.function, 1, WorkerState.READY, 1, modules=("torch",))
        node.bus.publish(subjects.runner_report(node.name), encode(RunnerReport(node.name, "r", 1.0, (report,))))
        await node.until(lambda: any(r.templates == ("", "torch") for r in node.reports))

    on_node(run)


def test_transitive_imports_need_no_separate_template(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(modules=("brings_numpy",))
        await node.start(templates=2)
        await settled(node)
        before = node.launcher.pids
        modules = ("brings_numpy", "numpy")
        report = WorkerReport("w-1", node.function, 1, WorkerState.READY, 1, modules=modules)
        node.bus.publish(subjects.runner_report(node.name), encode(RunnerReport(node.name, "r", 1.0, (report,))))
        await node.bus.flush()
        await node.deploy(number=2, modules=modules)
        await settled(node)
        assert (node.launcher.templates, node.launcher.pids) == (("", "brings_numpy"), before)

    on_node(run)


def test_a_template_serves_until_its_successor_is_there(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(modules=("torch",))
        await node.start(templates=2)
        await settled(node)
        old = node.launcher.pids
        await node.deploy(number=2, modules=("torch", "numpy"))
        report = await node.until(lambda: [r for r in node.reports if "numpy,torch" in r.templates])
        assert report[0].templates in (("", "torch", "numpy,torch"), ("", "numpy,torch"))
        await node.launcher.settled()
        assert node.launcher.templates == ("", "numpy,torch")
        assert len(node.launcher.pids & old) == 1

    on_node(run)


def _falls_back(on_node: Any, module: str) -> None:
    async def run(node: Any) -> None:
        await node.deploy("exit 0", modules=(module,))
        await node.start(templates=2, fork_timeout_s=0.2)
        await node.until(lambda: any(module in report.templates for report in node.reports))
        worker = await node.assign()
        event = await node.event(worker, "started")
        assert event.cold_start.standby is False
        assert (await node.event(worker, "exited")).exit.code == 0

    on_node(run)


def test_a_template_that_dies_costs_a_cold_start_only(on_node: Any) -> None:
    _falls_back(on_node, "breaks")


def test_a_template_that_hangs_costs_a_cold_start_only(on_node: Any) -> None:
    _falls_back(on_node, "hangs")


def test_a_template_that_refuses_costs_only_a_cold_start(on_node: Any) -> None:
    _falls_back(on_node, "says_no")


def _launched_during_an_import(on_node: Any, answer: str, *, forked_from_it: bool) -> None:
    """Launch a worker while its template imports. The template answers with `answer` once the launch waits."""

    async def run(node: Any) -> None:
        scratch = node.home.run / "t"
        scratch.mkdir(parents=True)
        os.mkfifo(scratch / "slow")
        await node.deploy(modules=("slow",), env={"HF_HOME": "/data"})
        await node.start(templates=2)
        await node.until(lambda: node.reports[-1].templates == ("",))
        workers = [await node.assign() for _ in range(2)]
        for worker in workers:
            await until_async((node.home.worker(worker) / "config.json").exists)
        await node.bus.flush()
        assert not [event for event in node.events if event.kind == "started"]
        (scratch / "slow").write_text(answer)
        for worker in workers:
            assert (await node.event(worker, "started")).cold_start.standby is True
            await node.until(lambda worker=worker: f"hello from {worker}" in [line.text for line in node.lines])
            assert imports_with(await node.pid(worker), DATA) is forked_from_it

    on_node(run)


def test_workers_that_start_while_their_template_imports_wait_for_it(on_node: Any) -> None:
    """One import instead of three."""
    _launched_during_an_import(on_node, "{}", forked_from_it=True)


def test_workers_start_without_the_template_that_they_waited_for_if_it_fails(on_node: Any) -> None:
    _launched_during_an_import(
        on_node, '{"error": "importing slow did it", "refused_module": "slow"}', forked_from_it=False
    )


def test_names_that_no_module_has_are_not_preloaded(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy()
        await node.start(templates=2)
        await settled(node)
        names = ("nul\0", "3204bda914b7f2c6f497__mypyc", "-c", "torch", *(f"m{number}" for number in range(300)))
        report = WorkerReport("w-1", node.function, 1, WorkerState.READY, 1, modules=names[:4])
        node.bus.publish(subjects.runner_report(node.name), encode(RunnerReport(node.name, "r", 1.0, (report,))))
        await node.until(lambda: any(r.templates == ("", "torch") for r in node.reports))
        report = WorkerReport("w-1", node.function, 1, WorkerState.READY, 1, modules=names)
        node.bus.publish(subjects.runner_report(node.name), encode(RunnerReport(node.name, "r", 2.0, (report,))))
        worker = await node.assign()
        assert (await node.event(worker, "started")).cold_start.standby is True

    on_node(run)


def test_an_invalid_request_costs_a_cold_start_and_not_the_template(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy(env={"BIG": "\x01" * 20_000})  # each is six bytes of JSON
        await node.start(templates=1)
        await settled(node)
        before = node.launcher.pids
        worker = await node.assign()
        assert (await node.event(worker, "started")).cold_start.standby is False
        assert node.launcher.pids == before

    on_node(run)


def test_bad_luck_of_long_ago_does_not_count_against_a_template(on_node: Any) -> None:
    async def run(node: Any) -> None:
        await node.deploy("exit 0")
        await node.start(templates=1)
        await settled(node)
        for _ in range(4):
            (pid,) = node.launcher.pids
            worker = await node.assign()
            assert (await node.event(worker, "started")).cold_start.standby is True
            os.kill(pid, signal.SIGKILL)
            await node.until(lambda pid=pid: node.launcher.pids and pid not in node.launcher.pids)
            await node.launcher.settled()
        assert node.launcher.templates == ("",)

    on_node(run)


def test_a_template_that_cannot_even_be_tried_leaves_the_rest_at_work(tmp_path: Path) -> None:
    async def main() -> None:
        launcher = TemplateLauncher(ProcessLauncher(), scratch=tmp_path, limit=2, command=("no\0command",))
        running = asyncio.create_task(launcher.run())
        launcher.set_uses([Use(frozenset({"numpy"}), 1.0)])
        async with asyncio.timeout(30):
            await launcher.settled()
        assert not running.done()
        assert launcher.templates == ()
        running.cancel()

    asyncio.run(main())


def test_templates_are_for_active_or_serving_revisions_and_not_for_deleted_functions(on_node: Any) -> None:
    async def run(node: Any) -> None:
        for number, module in enumerate(("numpy", "torch", "scipy"), 1):
            await node.deploy(number=number, modules=(module,))
        await node.activate(1)  # rolled back
        await node.start(templates=3)
        await node.until(lambda: node.reports[-1].templates == ("", "numpy"))
        await node.activate(2, serving=1)  # torch is being imported
        await node.until(lambda: node.reports[-1].templates == ("", "numpy", "torch"))
        await node.functions.delete(node.function)
        await node.until(lambda: node.reports[-1].templates == ())

    on_node(run)
