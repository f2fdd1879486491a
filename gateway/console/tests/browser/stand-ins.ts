/** Answers of the API that a platform under test does not have: prices, a long history, a busy worker, a traced call. */

import { dayOf } from "../../src/core/operate/usage";

const DAY_MS = 86_400_000;
const DAYS = [1, 2, 3, 4, 5, 6, 7].map((factor) => ({
  day: dayOf(Date.now() - (7 - factor) * DAY_MS),
  calls: 1000 * factor,
  gpu_used_s: 900 * factor,
  gpu_idle_s: 500 * factor,
  cpu_s: 2000,
  used: 0.2 * factor,
  idle: 0.11 * factor,
  cpu: 0.02,
  unused: 0.3,
  total: 0.31 * factor + 0.32,
  joules: 120_000 * factor,
  co2_g: 12 * factor,
}));

export const COSTS = {
  currency: "EUR",
  costs: DAYS,
  budgets: [{ subject: "team:budget", month: "2026-11", limit: 10, spent: 8.5, stops: true }],
};

export const ADVICE = {
  function: "nightly",
  advice: [
    { option: "memory", finding: "its largest worker used 512.00 MiB of 8.00 GiB", value: "704Mi", scale: {} },
    { option: "min_workers", finding: "the busiest minute of two days kept 0.80 of 4 workers busy", value: "1", scale: { min_workers: 1 } },
  ],
  idle_timeout: [
    { idle_timeout_s: 60, cold_starts: 12, worker_s: 3600, is_current: false },
    { idle_timeout_s: 600, cold_starts: 9, worker_s: 20_000, is_current: true },
  ],
  seen: { calls: 18_342 },
};

export const PROFILE = {
  name: "nightly, w-1",
  shared: {
    frames: [
      { name: "main", file: "gpufn_runtime/worker/__main__.py", line: 3 },
      { name: "predict", file: "app.py", line: 9 },
      { name: "encode", file: "app.py", line: 21 },
      { name: "pool", file: "app.py", line: 30 },
    ],
  },
  profiles: [
    {
      unit: "seconds",
      samples: [
        [0, 1, 2],
        [0, 1, 3],
        [0, 1],
      ],
      weights: [3, 1.5, 0.5],
    },
  ],
};

/** The live page of a function with one worker. */
export const NIGHTLY = {
  active: 2,
  serving: 2,
  updated_at: 1,
  min_workers: null,
  max_workers: null,
  workers: { ready: 1 },
  wanted: 1,
  queued: 0,
  running: 1,
  reason: "1 running",
  terms: {},
  waiting: null,
  service_s: 1,
  cold_start_s: 1,
  last_start: null,
  next: null,
  findings: [],
  processes: {
    "w-1": { node: "a", revision: 2, state: "ready", slots: 1, in_use: 1, poisoned: 0, waits_on: "", idle_since: null, cold_start: null, pid: 1, started_at: null, memory_bytes: null, gpus: [], gpu_bytes: null, gpus_busy: null },
  },
  calls_per_s: 0,
  errors_per_s: 0,
  error_share: null,
  p50_s: null,
  p99_s: null,
  run_s: null,
  gpus: 0,
};

/** The trace of a call that calls `embed`. */
export function traceOf(id: string): object {
  const span = (name: string, parent: string | null, start: number, end: number, kind: string, call = ""): object => ({
    id: `${parent ?? ""}.${name}`,
    parent,
    name,
    kind,
    function: name,
    start: 1000 + start,
    end: 1000 + end,
    attributes: { "faas.invocation_id": call },
    error: null,
    link: null,
  });
  const run = ".greet.run";
  return {
    id: "0af7651916cd43dd8448eb211c80319c",
    left_out: 0,
    spans: [
      span("greet", null, 0, 1, "consumer", id),
      span("queue", ".greet", 0, 0.1, "internal"),
      span("run", ".greet", 0.1, 1, "internal", id),
      span("embed", run, 0.2, 0.8, "server", "01m8ebv0c9ewm1r9pgz32f3x0z"),
      span("queue", `${run}.embed`, 0.2, 0.3, "internal"),
      span("run", `${run}.embed`, 0.3, 0.8, "internal"),
    ],
  };
}
