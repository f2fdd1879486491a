/** Apply the changes of a live page. Pure. What did not change keeps its identity, so its part of the page is not drawn again. */

export type Json = null | boolean | number | string | readonly Json[] | { readonly [key: string]: Json };
/** `[path, value]` sets the value at a path of object keys; `[path]` removes it. */
export type Change = readonly [path: readonly string[], value?: Json];

type Copy = Record<string, Json>;

export function applied(value: Json, changes: readonly Change[]): Json {
  const copies = new Set<Json>(); // objects that this delta has made: each is copied once, however many changes it has
  return changes.reduce((current, change) => withChange(current, change, 0, copies), value);
}

function withChange(value: Json, change: Change, depth: number, copies: Set<Json>): Json {
  const key = change[0][depth];
  if (key === undefined) {
    return change[1] ?? null;
  }
  const copy = ownCopy(value, copies);
  if (depth === change[0].length - 1 && change.length === 1) {
    delete copy[key];
  } else {
    copy[key] = withChange(copy[key] ?? null, change, depth + 1, copies);
  }
  return copy;
}

function ownCopy(value: Json, copies: Set<Json>): Copy {
  if (copies.has(value)) {
    return value as Copy;
  }
  const copy: Copy = isObject(value) ? { ...value } : {};
  copies.add(copy);
  return copy;
}

function isObject(value: Json): value is { readonly [key: string]: Json } {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
