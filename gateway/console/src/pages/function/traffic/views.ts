/** How a function's calls are divided, as the API shows it (docs/traffic.md). Times are Unix seconds. */

import type { WorkerCounts } from "../../../api/views";
import type { HeaderRule, Mirror } from "../../../core/traffic";

export interface CallCounts {
  readonly calls: number;
  readonly errors: number;
  readonly p50_s: number | null;
  readonly p99_s: number | null;
}

export interface RevisionTraffic {
  readonly revision: number;
  readonly workers: WorkerCounts;
  readonly queued: number | null;
  readonly running: number | null;
  readonly total: CallCounts;
  readonly recent: CallCounts;
  readonly start_error: { readonly message: string } | null;
}

export interface Compared {
  readonly revision: number;
  readonly equal: number;
  readonly different: number;
  readonly failed: number;
  readonly skipped: number;
  readonly p50_s: number | null;
  readonly copy_p50_s: number | null;
}

export interface Traffic {
  readonly active: number;
  readonly serving: number;
  readonly weights: Readonly<Record<string, number>>;
  /** null without a split. */
  readonly set_at: number | null;
  readonly headers: readonly HeaderRule[];
  readonly mirror: Mirror | null;
  readonly return_if: readonly string[];
  readonly window_s: number | null;
  readonly min_calls: number | null;
  readonly returned: { readonly at: number; readonly reason: string; readonly revision: number; readonly weights: string } | null;
  readonly revisions: readonly RevisionTraffic[];
  readonly compared: Compared | null;
}

export interface Difference {
  readonly at: number;
  readonly invocation: string;
  readonly comparison: string;
  readonly path: string;
  readonly answer: string;
  readonly copy: string;
}
