/** Records of the API that pages list (docs/http.md). Times are Unix seconds. */

import type { Json } from "../core/delta";
import type { Attempt } from "./views";

export interface MapStatus {
  readonly id: string;
  readonly function: string;
  readonly revision: number;
  readonly state: "open" | "running" | "ended" | "cancelled";
  readonly submitted_at: number;
  readonly accepted: number;
  readonly ended: number;
  /** Items among the newest thousand dead letters of the function. */
  readonly failed: number;
}

export interface Build {
  readonly id: string;
  readonly model: { readonly parameter: string; readonly precision?: string; readonly files: readonly { readonly name: string; readonly size: number }[] };
  readonly device: string;
  readonly created_at: number;
  readonly function: string;
  readonly state: "pending" | "building" | "succeeded" | "failed" | "cancelled";
  readonly cancel: boolean;
  readonly stage: string | null;
  readonly progress: number;
  readonly detail: string;
  readonly engines: readonly string[];
  readonly cached: boolean;
  readonly error: { readonly code: string; readonly message: string; readonly stage?: string; readonly traceback?: string } | null;
  readonly remarks: readonly string[];
  readonly started_at: number | null;
  readonly ended_at: number | null;
  readonly builder: string;
  readonly ahead: { readonly id?: string; readonly started_at?: number | null } | null;
  readonly links: { readonly report?: string; readonly page?: string };
}

export interface DeadLetter {
  readonly id: string;
  readonly function: string;
  readonly revision: number;
  readonly method: string;
  readonly content_type: string;
  readonly state: string;
  readonly submitted_at: number;
  readonly died_at: number;
  readonly error: { readonly code: string; readonly message: string; readonly error_type?: string } | null;
  readonly attempts: readonly Attempt[];
  readonly size: number;
  readonly priority: string;
}

export interface Schedule {
  readonly id: string;
  readonly function: string;
  readonly method: string;
  readonly cron: string | null;
  readonly timezone: string;
  readonly missed: string;
  readonly arguments: Readonly<Record<string, Json>>;
  readonly priority: string | null;
  readonly paused: boolean;
  readonly declared: boolean;
  readonly created_at: number;
  readonly next_at: number | null;
  readonly invocation: string | null;
}

export interface KeyLimits {
  readonly rate?: number | null;
  readonly burst?: number | null;
  readonly concurrency?: number | null;
  readonly queued?: number | null;
  readonly run_s?: number | null;
  readonly gpu_s?: number | null;
}

export interface Key {
  readonly id: string;
  readonly label: string;
  readonly scopes: readonly string[];
  readonly created_at: number;
  readonly limits: KeyLimits;
  readonly team: string;
  readonly expires_at: number | null;
  readonly replaced_until: number | null;
  readonly last_used_at?: number | null;
}

export interface User {
  readonly id: string;
  readonly issuer: string;
  readonly name: string;
  readonly scopes: readonly string[];
  readonly seen_at: number;
}

export interface TeamLimits {
  readonly workers?: number;
  readonly gpus?: number;
  readonly queued?: number;
  readonly run_s?: number;
  readonly gpu_s?: number;
  readonly stored_bytes?: number;
  readonly functions?: number;
}

export interface Team {
  readonly name: string;
  readonly owns: readonly string[];
  readonly weight?: number;
  readonly limits?: TeamLimits;
  readonly isolation?: string;
  readonly callers?: readonly string[];
  readonly trust_domains?: readonly string[];
  readonly use: Readonly<Record<keyof TeamLimits | "borrowed_gpus", number>>;
}

export interface Secret {
  readonly name: string;
  readonly scope: string;
  readonly version: number;
  readonly updated_at: number;
  readonly functions: readonly string[];
}

export interface Volume {
  readonly name: string;
  readonly versions: readonly { readonly number: number; readonly files: number; readonly bytes: number; readonly created_at: number }[];
  readonly stored_bytes: number;
}

export interface PlatformEvent {
  readonly id: number;
  readonly at: number;
  readonly kind: string;
  readonly subject: string;
  readonly text: string;
  readonly revision?: number;
  readonly node?: string;
}

/** A trusted key. `functions` are those whose active revision it signed. */
export interface Signer {
  readonly name: string;
  readonly id: string;
  readonly patterns: readonly string[];
  readonly added_at: number;
  readonly functions: readonly string[];
}

export interface Signing {
  readonly keys: readonly Signer[];
  /** The environments that require signatures. */
  readonly required: readonly string[];
}
