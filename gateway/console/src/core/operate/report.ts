/** The report of a build: what its plots show. Pure. */

export interface Candidate {
  readonly backend: string;
  readonly key: string;
  readonly found: boolean;
  readonly reason: string;
  readonly log: string;
  readonly size: number;
  readonly flags: Readonly<Record<string, string>>;
  readonly versions: Readonly<Record<string, string>>;
  readonly accuracy: { readonly max_abs: number | null; readonly rel_l2: number | null; readonly cosine: number | null } | null;
  readonly outputs: readonly OutputRow[];
  readonly latency: { readonly p50_s: number; readonly p90_s: number; readonly p99_s: number; readonly per_s: number; readonly settled: boolean } | null;
  readonly quantiles_s: readonly number[];
  readonly gpu_nodes: number;
  readonly cpu_nodes: number;
  readonly notes: readonly string[];
  readonly remarks: readonly string[];
}

export interface OutputRow {
  readonly case: string;
  readonly name: string;
  readonly dtype: string;
  readonly max_abs: number | null;
  readonly p999_abs: number | null;
  readonly rel_l2: number | null;
  readonly cosine: number | null;
  readonly argmax: number | null;
  readonly worst_element: { readonly value: string; readonly reference: string; readonly difference: number | null; readonly limit: number | null } | null;
  readonly passes_fp32: boolean;
}

export interface Report {
  readonly precision: string;
  readonly tolerance: Readonly<Record<string, number | null>>;
  readonly state: string;
  readonly seconds: number;
  readonly compute_capability: string;
  readonly driver: string;
  readonly batched: boolean;
  readonly why_alone: string;
  readonly max_batch: number;
  readonly stages: readonly { readonly stage: string; readonly seconds: number; readonly found: string }[];
  readonly candidates: readonly Candidate[];
}

export const STAGES = ["ingest", "normalise", "reference", "transform", "compile", "verify", "measure", "publish"] as const;

/** The latency of each candidate over the percentile of its runs, as lines of a plot from 0 to 1 in both directions. */
export interface Curve {
  readonly label: string;
  readonly points: readonly (readonly [number, number])[];
}

const LOG_FROM = 10; // the ratio from which a linear axis would only show a cliff
const LAST = 0.99;

export interface LatencyPlot {
  readonly curves: readonly Curve[];
  /** Seconds, and their height. */
  readonly ticks: readonly (readonly [number, number])[];
}

export function latencyPlot(candidates: readonly Candidate[]): LatencyPlot | null {
  const measured = candidates.flatMap((each) => (each.latency ? [{ label: each.backend, points: pointsOf(each) }] : []));
  const seconds = measured.flatMap((each) => each.points.filter(([share]) => share <= LAST).map(([, value]) => value)).filter((value) => value > 0);
  if (seconds.length === 0) {
    return null;
  }
  const { height, ticks } = axis(Math.min(...seconds), Math.max(...seconds));
  return {
    curves: measured.map(({ label, points }) => ({ label, points: points.map(([share, value]) => [share, Math.min(1, height(value))] as const) })),
    ticks: ticks.map((tick) => [tick, height(tick)] as const),
  };
}

function pointsOf(candidate: Candidate): (readonly [number, number])[] {
  const quantiles = candidate.quantiles_s;
  if (quantiles.length > 1) {
    return quantiles.map((value, index) => [index / (quantiles.length - 1), value] as const);
  }
  const { latency } = candidate;
  return latency ? [[0.5, latency.p50_s], [0.9, latency.p90_s], [0.99, latency.p99_s]] : [];
}

function axis(low: number, high: number): { height: (seconds: number) => number; ticks: number[] } {
  if (high > LOG_FROM * low) {
    const first = Math.floor(Math.log10(low));
    const decades = Math.max(1, Math.ceil(Math.log10(high)) - first);
    return {
      height: (seconds) => Math.max(0, (Math.log10(seconds || 10 ** first) - first) / decades),
      ticks: Array.from({ length: decades + 1 }, (_, index) => 10 ** (first + index)),
    };
  }
  const top = high * 1.15;
  const rough = top / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough) ?? rough;
  return { height: (seconds) => seconds / top, ticks: Array.from({ length: Math.floor(top / step) + 1 }, (_, index) => index * step) };
}

/** The worst output of each candidate, the largest error first. */
export function worstOutputs(report: Report): { readonly backend: string; readonly output: OutputRow }[] {
  return report.candidates
    .filter((each) => !each.reason)
    .flatMap((each) => each.outputs.map((output) => ({ backend: each.backend, output })))
    .sort((a, b) => (b.output.rel_l2 ?? Infinity) - (a.output.rel_l2 ?? Infinity));
}

/** How much of its limit the worst element of an output has; null if the tolerance limits no elements. */
export function partOfLimit(output: OutputRow): number | null {
  const worst = output.worst_element;
  if (!worst || worst.limit === null || worst.difference === null) {
    return null;
  }
  return worst.limit === 0 ? (worst.difference === 0 ? 0 : Infinity) : worst.difference / worst.limit;
}
