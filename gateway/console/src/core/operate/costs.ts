/** Costs of functions, apps, teams, keys and days, as the API groups them. Pure. */

export const GROUPS = { function: "by function", app: "by app", team: "by team", key: "by API key", day: "by day" } as const;

export type Group = keyof typeof GROUPS;

/** One group. Without prices all amounts are 0. The name of its group is in the member of the group. */
export interface Cost {
  readonly function?: string;
  readonly app?: string;
  readonly team?: string;
  readonly key?: string;
  readonly day?: string;
  readonly calls: number;
  readonly gpu_used_s: number;
  readonly gpu_idle_s: number;
  readonly cpu_s: number;
  readonly used: number;
  readonly idle: number;
  readonly cpu: number;
  readonly unused: number;
  readonly total: number;
  /** null: the energy of no call is known. */
  readonly joules: number | null;
  readonly co2_g: number | null;
}

export interface Budget {
  readonly subject: string;
  readonly month: string;
  readonly limit: number;
  readonly spent: number;
  readonly stops: boolean;
}

export interface Costs {
  /** null: the gateway has no prices. */
  readonly currency: string | null;
  readonly costs: readonly Cost[];
  readonly budgets: readonly Budget[];
}

/** The parts of a cost, from the bottom of a bar to its top. */
export const PARTS = ["idle", "used", "cpu", "unused"] as const;

export const NO_COST: Cost = { calls: 0, gpu_used_s: 0, gpu_idle_s: 0, cpu_s: 0, used: 0, idle: 0, cpu: 0, unused: 0, total: 0, joules: null, co2_g: null };

export function sumOf(costs: readonly Cost[]): Cost {
  return costs.reduce(
    (sum, each) => ({
      calls: sum.calls + each.calls,
      gpu_used_s: sum.gpu_used_s + each.gpu_used_s,
      gpu_idle_s: sum.gpu_idle_s + each.gpu_idle_s,
      cpu_s: sum.cpu_s + each.cpu_s,
      used: sum.used + each.used,
      idle: sum.idle + each.idle,
      cpu: sum.cpu + each.cpu,
      unused: sum.unused + each.unused,
      total: sum.total + each.total,
      joules: added(sum.joules, each.joules),
      co2_g: added(sum.co2_g, each.co2_g),
    }),
    NO_COST,
  );
}

function added(one: number | null, other: number | null): number | null {
  return other === null ? one : (one ?? 0) + other;
}

/** Add up the rows of functions or apps that are charged to the same name. */
export function folded(costs: readonly Cost[], group: "function" | "app", charged: (name: string) => string): readonly Cost[] {
  const rows = new Map<string, Cost[]>();
  for (const each of costs) {
    const name = charged(each[group] ?? "");
    rows.set(name, [...(rows.get(name) ?? []), each]);
  }
  return [...rows].map(([name, all]) => ({ ...sumOf(all), [group]: name }));
}

/** The groups in the order of the table: days by time, others by cost, then by GPU time. */
export function ordered(costs: readonly Cost[], group: Group): readonly Cost[] {
  const seconds = (each: Cost): number => each.gpu_used_s + each.gpu_idle_s;
  return [...costs].sort((a, b) => (group === "day" ? (b.day ?? "").localeCompare(a.day ?? "") : b.total - a.total || seconds(b) - seconds(a) || (a[group] ?? "").localeCompare(b[group] ?? "")));
}

/** The values of each day's bar: amounts of PARTS, or without prices the seconds of idle and used GPU time. */
export function barsOf(days: readonly string[], costs: readonly Cost[], hasPrices: boolean): { day: string; values: number[] }[] {
  const byDay = new Map(costs.map((each) => [each.day ?? "", each]));
  return days.map((day) => {
    const cost = byDay.get(day) ?? NO_COST;
    return { day, values: hasPrices ? PARTS.map((part) => cost[part]) : [cost.gpu_idle_s, cost.gpu_used_s] };
  });
}
