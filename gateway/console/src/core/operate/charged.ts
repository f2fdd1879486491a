/** The name that usage and costs are charged to: that of `gpufn usage` and `gpufn cost`. Pure. */

export const TEMPORARY = "(temporary functions)";

/**
 * Return the function of a variant or a terminal, and one name for all functions of `gpufn run` and those that `gpufn
 * serve` served before. `existing` has the full names of functions, or of apps; null: they are not known yet.
 */
export function chargedTo(name: string, existing: ReadonlySet<string> | null): string {
  const base = name.split("=")[0] ?? name;
  const hasEnded = /^run-[0-9a-z]{10}\//.test(name) || (isServed(name) && existing !== null && !existing.has(base));
  return hasEnded ? TEMPORARY : base;
}

/** Whether `gpufn serve` serves a function or an app of this name, or served it before. */
export function isServed(name: string): boolean {
  return name.startsWith("dev-") && name.includes("/");
}

/** The full names of functions, and of their apps. */
export function existingNames(functions: readonly { readonly name: string }[]): ReadonlySet<string> {
  return new Set(functions.flatMap(({ name }) => [name, name.split("/").slice(0, 2).join("/")]));
}
