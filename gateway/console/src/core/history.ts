/** Series of the history (docs/history.md) as lines of a chart. Pure. */

export interface History {
  readonly from: number;
  readonly to: number;
  readonly step: number;
  readonly at: readonly number[];
  readonly results: readonly { readonly subject: string; readonly series: readonly HistorySeries[] }[];
}

export interface HistorySeries {
  readonly name: string;
  readonly unit: string;
  readonly values: readonly (number | null)[];
}

export type Lines = readonly [readonly number[], ...(readonly (number | null)[])[]];

/** The ranges that a viewer can choose, with the seconds of each. */
export const RANGES = { "1 h": 3600, "6 h": 21_600, "1 d": 86_400, "7 d": 604_800, "30 d": 2_592_000 } as const;

/** Counts of a step, which a chart shows per second. */
const COUNTS = new Set(["calls", "failed", "errors", "refusals", "gpu_s", "starts", "start_failures"]);

const LATE_S = 10; // the history has a slot that long after its end

/** Return the lines of the named series. A series that the answer lacks has gaps only. A step that has not ended yet is left out: its counts would look like a drop. */
export function linesOf(history: History, names: readonly string[]): Lines {
  const complete = history.at.filter((at) => at + history.step <= history.to - LATE_S).length;
  const series = new Map(history.results[0]?.series.map((each) => [each.name, each.values]) ?? []);
  const lines = names.map((name) => {
    const values = series.get(name) ?? history.at.map(() => null);
    const shown = values.slice(0, complete);
    return COUNTS.has(name) ? shown.map((value) => (value === null ? null : value / history.step)) : shown;
  });
  return [history.at.slice(0, complete), ...lines];
}

export function hasValues(lines: Lines): boolean {
  return lines.slice(1).some((values) => values.some((value) => value !== null));
}
