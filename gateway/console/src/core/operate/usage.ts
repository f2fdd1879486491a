/** Usage of calls, summed for a table and a chart. Pure. */

export interface UsageRow {
  readonly day: string;
  readonly function: string;
  readonly key: string;
  readonly usage: { readonly calls: number; readonly failed: number; readonly run_s: number; readonly gpu_s: number; readonly joules: number | null };
}

export type Group = "function" | "key" | "day";

export interface Total {
  readonly name: string;
  readonly calls: number;
  readonly failed: number;
  readonly run_s: number;
  readonly gpu_s: number;
  /** null: the energy of no call is known. */
  readonly joules: number | null;
}

const NONE: Omit<Total, "name"> = { calls: 0, failed: 0, run_s: 0, gpu_s: 0, joules: null };

/** Sum the rows by function, key or day. Days are in their order, others by GPU time and run time. */
export function totals(rows: readonly UsageRow[], group: Group): Total[] {
  const sums = new Map<string, Omit<Total, "name">>();
  for (const row of rows) {
    const { usage } = row;
    const before = sums.get(row[group]) ?? NONE;
    sums.set(row[group], {
      calls: before.calls + usage.calls,
      failed: before.failed + usage.failed,
      run_s: before.run_s + usage.run_s,
      gpu_s: before.gpu_s + usage.gpu_s,
      joules: usage.joules === null ? before.joules : (before.joules ?? 0) + usage.joules,
    });
  }
  const found = [...sums.entries()].map(([name, sum]) => ({ name, ...sum }));
  return found.sort(group === "day" ? (a, b) => a.name.localeCompare(b.name) : (a, b) => b.gpu_s - a.gpu_s || b.run_s - a.run_s || a.name.localeCompare(b.name));
}

/** The UTC day of a time, such as 2026-11-27. */
export function dayOf(milliseconds: number): string {
  return new Date(milliseconds).toISOString().slice(0, 10);
}

/** All days from the first to the last. */
export function daysFrom(first: string, last: string): string[] {
  const days: string[] = [];
  for (let at = Date.parse(first); at <= Date.parse(last); at += 86_400_000) {
    days.push(dayOf(at));
  }
  return days;
}
