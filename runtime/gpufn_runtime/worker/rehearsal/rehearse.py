"""Rehearsal of a worker's start, in a process that was forked ahead of its request.

A forked process shares the memory of its template, and copies a page when it first writes to it. Counting references
writes to nearly all objects that a start uses: 700 pages, at 4 µs each. The rehearsal has them copied before the
request.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

import msgspec

from gpufn_core.protocol.launch import WorkerConfig
from gpufn_core.spec.function_spec import EntryPoint, FunctionSpec, MethodSpec
from gpufn_runtime.worker import process
from gpufn_runtime.worker.arguments import loader
from gpufn_runtime.worker.lifecycle import Worker
from gpufn_runtime.worker.link import Link, unix_dialer
from gpufn_runtime.worker.platform_calls.output import Output

_BUNDLE = os.path.join(os.path.dirname(__file__), "bundle")
_MODULE = "gpufn_rehearsal"


def rehearse() -> None:
    """Run the steps common to all starts, without a runner and without user code. Undo each effect but the copied
    pages."""
    environ = dict(os.environ)
    os.environ.clear()
    os.environ.update(environ)
    config = msgspec.json.decode(msgspec.json.encode(_config()), type=WorkerConfig)
    Worker(config)
    process.enable_crash_tracebacks()
    process.confine(config)
    _connect(config)
    _load(config)


def _connect(config: WorkerConfig) -> None:
    link = Link(unix_dialer(config.socket), config.worker)
    link.connect(0.0)
    output, last_resort = Output(link), logging.lastResort
    output.capture()
    output.capture_logging()
    output.release()
    logging.lastResort = last_resort
    reader = threading.Thread(target=_nothing, daemon=True)
    reader.start()
    reader.join()


def _load(config: WorkerConfig) -> None:
    folder = os.getcwd()
    try:
        loader.load(config).instantiate()
    finally:
        os.chdir(folder)
        sys.path.remove(_BUNDLE)
        sys.path_importer_cache.pop(_BUNDLE, None)
        sys.modules.pop(_MODULE, None)


def _config() -> WorkerConfig:
    spec = FunctionSpec(name="rehearsal", entry=EntryPoint(_MODULE, "rehearse"), methods=(MethodSpec(),))
    return WorkerConfig(
        worker="w-0", function="rehearsal", revision=1, spec=spec, bundle_dir=_BUNDLE, socket="", launched_at=0.0
    )


def _nothing() -> None:
    pass
