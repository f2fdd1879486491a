/** The critical path: which parts of nested spans, or of the items of a map, decided when the whole ended. Pure. */

export interface PathSpan {
  readonly id: string;
  readonly parent: string | null;
  readonly name: string;
  readonly start: number;
  readonly end: number;
}

export interface Part {
  readonly id: string;
  readonly start: number;
  readonly end: number;
}

export interface Row<T extends PathSpan> {
  readonly span: T;
  readonly depth: number;
}

/** The spans with their depth, each below its parent, by their start. A span whose parent is unknown is at the top. */
export function nested<T extends PathSpan>(spans: readonly T[]): Row<T>[] {
  const children = childrenOf(spans);
  const rows: Row<T>[] = [];
  const add = (parent: string, depth: number): void => {
    for (const span of children.get(parent) ?? []) {
      rows.push({ span, depth });
      add(span.id, depth + 1);
    }
  };
  add("", 0);
  return rows;
}

/** A span with all that are below it. Empty if it is not among them. */
export function below<T extends PathSpan>(spans: readonly T[], id: string): T[] {
  const children = childrenOf(spans);
  const root = spans.find((each) => each.id === id);
  const found: T[] = [];
  const waiting = root ? [root] : [];
  for (let span = waiting.pop(); span !== undefined; span = waiting.pop()) {
    found.push(span);
    waiting.push(...(children.get(span.id) ?? []));
  }
  return found;
}

function childrenOf<T extends PathSpan>(spans: readonly T[]): Map<string, T[]> {
  const byId = new Map(spans.map((each) => [each.id, each]));
  const children = new Map<string, T[]>();
  for (const span of byId.values()) {
    const parent = span.parent !== null && byId.has(span.parent) && !isAboveItself(span, byId) ? span.parent : "";
    const siblings = children.get(parent);
    if (siblings) {
      siblings.push(span);
    } else {
      children.set(parent, [span]);
    }
  }
  for (const group of children.values()) {
    group.sort((a, b) => a.start - b.start || b.end - a.end);
  }
  return children;
}

/** Whether the parents of a span lead back to it. Clients choose ids of calls and of their parents, so they can name a circle. */
function isAboveItself(span: PathSpan, byId: ReadonlyMap<string, PathSpan>): boolean {
  const seen = new Set<string>();
  for (let id = span.parent; id !== null && !seen.has(id); id = byId.get(id)?.parent ?? null) {
    if (id === span.id) {
      return true;
    }
    seen.add(id);
  }
  return false;
}

/** The parts on the path to the end of `root`, in the order of time. They have no gap and do not overlap: going back from the end, the path goes
 * through the span that ended last before it, and a time in which no nested span ran belongs to the span itself. */
export function criticalPath(spans: readonly PathSpan[], root: PathSpan): Part[] {
  const children = childrenOf(spans);
  const parts: Part[] = [];
  const walk = (span: PathSpan, since: number, until: number): void => {
    let at = until;
    for (const child of [...(children.get(span.id) ?? [])].sort((a, b) => b.end - a.end)) {
      if (child.end <= at && child.end > since && child.start < child.end) {
        const start = Math.max(child.start, since);
        add(span.id, child.end, at);
        walk(child, start, child.end);
        at = start;
      }
    }
    add(span.id, since, at);
  };
  const add = (id: string, start: number, end: number): void => {
    if (end > start) {
      parts.push({ id, start, end });
    }
  };
  walk(root, root.start, root.end);
  return parts.reverse();
}

export interface Share {
  readonly id: string;
  readonly seconds: number;
}

/** The time that each span has on the path, the longest first. */
export function shares(parts: readonly Part[]): Share[] {
  const seconds = new Map<string, number>();
  for (const part of parts) {
    seconds.set(part.id, (seconds.get(part.id) ?? 0) + part.end - part.start);
  }
  return [...seconds].map(([id, total]) => ({ id, seconds: total })).sort((a, b) => b.seconds - a.seconds);
}

export interface Item {
  readonly id: string;
  readonly worker: string;
  readonly start: number;
  readonly end: number;
}

export interface Lane {
  readonly worker: string;
  readonly items: readonly Item[];
}

/** A line of items for each worker. A worker that runs several at a time has several lines. */
export function lanesOf(items: readonly Item[]): Lane[] {
  const lanes: { worker: string; items: Item[] }[] = [];
  for (const item of [...items].sort((a, b) => a.worker.localeCompare(b.worker) || a.start - b.start)) {
    const free = lanes.find((lane) => lane.worker === item.worker && (lane.items.at(-1)?.end ?? 0) <= item.start + TOUCH_S);
    if (free) {
      free.items.push(item);
    } else {
      lanes.push({ worker: item.worker, items: [item] });
    }
  }
  return lanes;
}

const TOUCH_S = 0.002; // times of one runner that are so close belong to each other

/** The items that decided the end, in the order of time: the one that ended last, the one that its worker ran before it, and so on. */
export function chainOf(items: readonly Item[]): Item[] {
  const last = items.reduce<Item | null>((latest, each) => (latest === null || each.end > latest.end ? each : latest), null);
  const chain: Item[] = [];
  for (let item = last; item !== null; ) {
    chain.unshift(item);
    const { worker, start } = item;
    item = items.reduce<Item | null>(
      (latest, each) => (each.worker === worker && each.start < start && each.end <= start + TOUCH_S && each.end > (latest?.end ?? -Infinity) ? each : latest),
      null,
    );
  }
  return chain;
}

/** Why a map did not end sooner: its last item was long, its workers were busy all the time, or they waited. */
export type Verdict = "straggler" | "saturated" | "waiting";

const LONG = 3; // times the median
const BUSY = 0.8; // of the time

export function verdictOf(chain: readonly Item[], items: readonly Item[]): Verdict {
  const times = items.map((each) => each.end - each.start).sort((a, b) => a - b);
  const last = chain.at(-1);
  const first = chain[0];
  if (last === undefined || first === undefined) {
    return "waiting";
  }
  if (items.length > 2 && last.end - last.start > LONG * (times[Math.floor(times.length / 2)] ?? 0)) {
    return "straggler";
  }
  const busy = chain.reduce((sum, each) => sum + each.end - each.start, 0);
  return busy >= BUSY * (last.end - first.start) ? "saturated" : "waiting";
}
