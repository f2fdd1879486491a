/** The outcomes of the items of a map, as they end. Pure. */

export interface Outcome {
  readonly index: number;
  readonly state: string;
  readonly error?: { readonly code: string; readonly detail: string; readonly error_type?: string };
}

export interface Outcomes {
  /** Items that ended, by their state. */
  readonly counts: Readonly<Record<string, number>>;
  /** The first ones that ended without a result. */
  readonly failed: readonly Outcome[];
}

export const NO_OUTCOMES: Outcomes = { counts: {}, failed: [] };
const KEPT = 200;

/** Add lines of `application/x-ndjson`. The results in them are not kept. */
export function withLines(before: Outcomes, lines: readonly string[]): Outcomes {
  const counts: Record<string, number> = { ...before.counts };
  const failed = [...before.failed];
  for (const line of lines.filter(Boolean)) {
    const { index, state, error } = JSON.parse(line) as Outcome;
    counts[state] = (counts[state] ?? 0) + 1;
    if (state !== "succeeded" && failed.length < KEPT) {
      failed.push(error ? { index, state, error } : { index, state });
    }
  }
  return { counts, failed };
}

export function endedOf(outcomes: Outcomes): number {
  return Object.values(outcomes.counts).reduce((sum, count) => sum + count, 0);
}
