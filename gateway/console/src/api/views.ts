/** The live pages as the gateway sends them (gateway/gpufn_gateway/console/live). Times are Unix seconds. */

import type { Json } from "../core/delta";

export interface Rates {
  readonly calls_per_s: number;
  readonly errors_per_s: number;
  readonly error_share: number | null;
  readonly p50_s: number | null;
  readonly p99_s: number | null;
  readonly run_s: number | null;
  readonly gpus: number;
}

export type WorkerCounts = Readonly<Record<string, number>>;

export interface Finding {
  readonly severity: "critical" | "warning";
  readonly kind: "platform" | "function" | "node";
  readonly subject: string;
  readonly code: string;
  readonly title: string;
  readonly text: string;
}

export interface Sum extends Rates {
  readonly functions: number;
  readonly workers: WorkerCounts;
  readonly queued: number;
  readonly running: number;
}

export interface Gpus {
  readonly count: number;
  readonly busy: number | null;
  readonly memory_used_bytes: number | null;
  readonly memory_bytes: number;
}

export interface Overview {
  readonly total: Sum & { readonly apps: number };
  readonly nodes: { readonly count: number; readonly gpus: Gpus } | null;
  readonly findings: readonly Finding[];
  readonly apps: Readonly<Record<string, Sum>>;
  readonly busiest: Readonly<Record<string, FunctionRow>>;
}

/** The weights of revisions in percent, and the revision that gets copies of calls. */
export interface SplitLive {
  readonly weights: Readonly<Record<string, number>>;
  readonly mirror: number | null;
}

export interface FunctionRow extends Rates {
  readonly serving: number;
  readonly active: number;
  readonly split: SplitLive | null;
  readonly gpu: string;
  readonly models: number;
  readonly web: boolean;
  readonly workers: WorkerCounts;
  readonly wanted: number;
  readonly queued: number | null;
  readonly running: number | null;
  readonly waiting: string | null;
  readonly finding: { readonly severity: Finding["severity"]; readonly title: string } | null;
}

export interface FunctionList {
  readonly all: number;
  readonly matching: number;
  readonly offset: number;
  readonly order: readonly string[];
  readonly rows: Readonly<Record<string, FunctionRow>>;
}

export interface WorkerView {
  readonly node: string;
  readonly revision: number;
  readonly state: string;
  readonly slots: number;
  readonly in_use: number;
  readonly poisoned: number;
  readonly waits_on: string;
  readonly idle_since: number | null;
  readonly cold_start: Readonly<Record<string, number>> | null;
  readonly pid: number | null;
  readonly started_at: number | null;
  readonly memory_bytes: number | null;
  readonly gpus: readonly string[];
  readonly gpu_bytes: number | null;
  readonly gpus_busy: number | null;
}

export interface FunctionLive extends Rates {
  readonly active: number;
  readonly serving: number;
  readonly split: SplitLive | null;
  readonly updated_at: number;
  readonly min_workers: number | null;
  readonly max_workers: number | null;
  readonly workers: WorkerCounts;
  readonly wanted: number;
  readonly queued: number | null;
  readonly running: number | null;
  readonly reason: string;
  readonly terms: Readonly<Record<string, number>>;
  readonly waiting: { readonly reason: string; readonly detail: string; readonly eta_s: number | null } | null;
  readonly service_s: number | null;
  readonly cold_start_s: number | null;
  readonly last_start: { readonly node: string; readonly at: number; readonly phases: Readonly<Record<string, number>> } | null;
  readonly next: { readonly revision: number; readonly start_error: { readonly message: string } | null } | null;
  readonly findings: readonly Finding[];
  readonly processes: Readonly<Record<string, WorkerView>>;
}

export interface Method {
  readonly name?: string;
  readonly kind?: string;
  readonly parameters?: Readonly<Record<string, Json>>;
  readonly returns?: Readonly<Record<string, Json>>;
  readonly doc?: string;
}

export interface Spec {
  readonly methods: readonly Method[];
  readonly resources: { readonly gpu: readonly string[]; readonly [option: string]: Json };
  readonly scaling: { readonly min_workers: number; readonly max_workers: number; readonly [option: string]: Json };
  readonly web?: { readonly kind: string; readonly public: boolean };
  readonly is_class: boolean;
}

export interface Source {
  readonly file: string;
  readonly project: string;
  readonly deployer: string;
}

export interface FunctionView {
  readonly name: string;
  readonly active: number;
  readonly serving: number;
  readonly latest: number;
  readonly deployed_at: number | null;
  readonly source: Source | null;
  readonly env: readonly string[];
  readonly spec: Spec;
}

/** What the history says about the options of a function (docs/history.md, "Advice"). */
export interface AdviceView {
  readonly function: string;
  readonly advice: readonly {
    readonly option: string;
    readonly finding: string;
    /** What to set the option to; "" if the figures only inform. */
    readonly value: string;
    /** The body of the request to scale that follows the advice. Empty: it needs a deploy. */
    readonly scale: Readonly<Record<string, number>>;
  }[];
  readonly idle_timeout: readonly { readonly idle_timeout_s: number; readonly cold_starts: number; readonly worker_s: number; readonly is_current: boolean }[];
  readonly seen: { readonly calls: number };
}

export interface Revision {
  readonly number: number;
  readonly created_at: number;
  readonly state: string;
  readonly active: boolean;
  readonly serving: boolean;
  readonly signed_by: string;
  readonly code: string;
}

export interface RevisionDetails extends Revision {
  readonly spec: Json;
  readonly env: readonly string[];
  readonly source: Source | null;
  readonly check: { readonly state: string; readonly reason: string } | null;
  readonly error: { readonly message: string } | null;
}

export interface Attempt {
  readonly number: number;
  readonly outcome: string;
  readonly ended_at: number;
  readonly started_at?: number | null;
  readonly worker?: string;
  readonly node?: string;
  readonly code?: string;
  readonly message?: string;
  readonly gpu_s?: number;
  readonly reason?: string | null;
}

export interface Call {
  readonly id: string;
  readonly function: string;
  readonly revision: number;
  readonly state: "queued" | "running" | "succeeded" | "failed" | "cancelled" | "timed_out" | "expired";
  readonly priority: string;
  /** The id of the API key that made it, or "platform". */
  readonly key: string;
  readonly parent: string | null;
  readonly trace: string | null;
  readonly submitted_at: number;
  readonly started_at: number | null;
  readonly ended_at: number | null;
  readonly attempt: number;
  readonly attempts: readonly Attempt[];
  readonly worker: string;
  readonly progress: Json;
  readonly queue_s: number | null;
  readonly run_s: number | null;
  readonly gpu_s: number;
  readonly timings: Readonly<Record<string, number>>;
  readonly size: number;
  readonly error: { readonly code: string; readonly message: string; readonly error_type?: string; readonly traceback?: string } | null;
  readonly waiting: { readonly reason: string; readonly detail: string; readonly eta_s: number | null } | null;
  readonly place: number | null;
  readonly eta_s: number | null;
}

/** The spans of a trace (docs/traces.md). */
export interface TraceView {
  readonly id: string;
  readonly spans: readonly TracedSpan[];
  readonly left_out: number;
}

export interface TracedSpan {
  readonly id: string;
  readonly parent: string | null;
  readonly name: string;
  readonly kind: "internal" | "server" | "producer" | "consumer";
  readonly function: string;
  readonly start: number;
  readonly end: number;
  readonly attributes: Readonly<Record<string, string | number | boolean>>;
  readonly error: { readonly code: string; readonly message: string } | null;
}

/** Events of the last hour as a number from 0 to 1, and the advice to drain (docs/metrics.md). */
export interface Score {
  readonly value: number;
  readonly reasons: readonly string[];
  readonly drain: boolean;
}

export interface GpuShare {
  readonly function: string;
  readonly sm_percent: number;
  readonly vram_bytes: number;
  /** The part of the GPU that the worker is charged for. */
  readonly charged: number;
  readonly memory_bytes: number | null;
  readonly busy: number | null;
  readonly parked: boolean;
}

export interface Gpu {
  readonly kind: string;
  readonly memory_bytes: number;
  readonly health: "healthy" | "degraded" | "failed";
  readonly health_reason: string;
  readonly score: Score;
  /** The uuid of the GPU of a MIG instance. */
  readonly parent: string;
  /** Held by processes that are not the platform's. */
  readonly foreign_bytes: number;
  readonly workers: Readonly<Record<string, GpuShare>>;
  readonly mode: string | null;
  readonly utilisation: number | null;
  readonly memory_used_bytes: number | null;
  readonly temperature_c: number | null;
  readonly temperature_limit_c: number | null;
  readonly power_w: number | null;
  readonly power_limit_w: number | null;
}

/** A node accepts no new workers since then. */
export interface Drain {
  readonly since: number;
  readonly by: string;
}

export interface NodeView {
  readonly address: string;
  readonly drained: Drain | null;
  readonly score: Score;
  readonly platform: string;
  readonly driver: string;
  readonly cuda: string;
  readonly mps: string;
  readonly clock_skew_s: number | null;
  readonly cores: number;
  readonly cores_reserved: number;
  readonly memory_bytes: number;
  readonly memory_reserved_bytes: number;
  readonly gpus: Readonly<Record<string, Gpu>>;
  readonly functions: Readonly<Record<string, number>>;
  readonly trouble: Readonly<Record<string, string>>;
}

export interface Nodes {
  readonly findings: readonly Finding[];
  readonly nodes: Readonly<Record<string, NodeView>>;
  /** The drained nodes that do not report. */
  readonly not_reporting: Readonly<Record<string, Drain>>;
}
