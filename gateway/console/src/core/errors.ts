/** Failures of calls, grouped by type. Pure. */

export interface Failure {
  readonly at: number;
  readonly call: string;
  /** The class of the exception, or the code of the platform. */
  readonly type: string;
  readonly message: string;
  readonly traceback: string;
}

export interface FailureGroup {
  readonly type: string;
  readonly count: number;
  readonly last: Failure;
  readonly first_at: number;
}

/** Group failures by their type; the type that failed last comes first. */
export function grouped(failures: readonly Failure[]): FailureGroup[] {
  const groups = new Map<string, Failure[]>();
  for (const failure of failures) {
    groups.set(failure.type, [...(groups.get(failure.type) ?? []), failure]);
  }
  return [...groups.entries()]
    .map(([type, found]) => {
      const sorted = [...found].sort((a, b) => b.at - a.at);
      const last = sorted[0];
      const first = sorted[sorted.length - 1];
      return last && first ? { type, count: found.length, last, first_at: first.at } : null;
    })
    .filter((group) => group !== null)
    .sort((a, b) => b.last.at - a.last.at);
}

export interface LogLine {
  /** Its place in what this page has read. */
  readonly number?: number;
  readonly at: number;
  readonly revision: number;
  readonly worker: string;
  readonly stream: string;
  readonly text: string;
  readonly invocation?: string;
}

/** The failure that a line of the log reports; null for other output. The last line of a traceback names the exception. */
export function failureIn(line: LogLine): Failure | null {
  if (line.stream !== "error") {
    return null;
  }
  const lines = line.text.trimEnd().split("\n");
  const last = [...lines].reverse().find((each) => /^[A-Za-z_][\w.]*(:|$)/.test(each)) ?? lines[0] ?? "";
  const colon = last.indexOf(":");
  const type = colon < 0 ? last : last.slice(0, colon);
  const message = colon < 0 ? "" : last.slice(colon + 1).trim();
  return { at: line.at, call: line.invocation ?? "", type: type.trim(), message, traceback: line.text };
}
