/** The options that differ between two revisions. Pure. */

import type { Json } from "./delta";

export interface OptionChange {
  readonly option: string;
  readonly before: string;
  readonly after: string;
}

/** Return the changed options by their path: "scaling.max_workers". */
export function optionChanges(before: Json, after: Json): OptionChange[] {
  const left = flattened(before);
  const right = flattened(after);
  const options = [...new Set([...left.keys(), ...right.keys()])].sort();
  return options
    .map((option) => ({ option, before: left.get(option) ?? "", after: right.get(option) ?? "" }))
    .filter((change) => change.before !== change.after);
}

function flattened(value: Json, path = "", found = new Map<string, string>()): Map<string, string> {
  if (typeof value === "object" && value !== null && !Array.isArray(value)) {
    for (const [key, each] of Object.entries(value)) {
      flattened(each, path ? `${path}.${key}` : key, found);
    }
  } else if (path) {
    found.set(path, JSON.stringify(value));
  }
  return found;
}
