/** The split of a function's calls between its revisions: texts, and what a form of it sends. Pure. */

import { linesOf, numberOf, numbersOf, textOf } from "./form";

export interface HeaderRule {
  readonly name: string;
  readonly value: string;
  readonly revision: number;
}

export interface Mirror {
  readonly revision: number;
  readonly percent: number;
  readonly tolerance: number;
}

/** The body of PUT /v1/functions/{fn}/traffic (docs/traffic.md). */
export interface SplitBody {
  readonly weights: Readonly<Record<string, number>>;
  readonly headers: readonly HeaderRule[];
  readonly mirror: Mirror | null;
  readonly return_if: readonly string[];
  readonly window_s?: number;
  readonly min_calls?: number;
}

/** "1=90 %, 2=10 %, copies to 3", as `gpufn ls` shows it. */
export function splitText(split: { readonly weights: Readonly<Record<string, number>>; readonly mirror: number | null }): string {
  const parts = Object.entries(split.weights).map(([revision, weight]) => `${revision}=${weight} %`);
  return [...parts, ...(split.mirror === null ? [] : [`copies to ${split.mirror}`])].join(", ");
}

export function ruleText(rule: HeaderRule): string {
  return `${rule.name}=${rule.value}:${rule.revision}`;
}

/** A rule from NAME=VALUE:REVISION, as `gpufn traffic --header` takes it. */
function ruleOf(line: string): HeaderRule {
  const match = /^([^=\s]+)=(.+):(\d{1,9})$/.exec(line);
  if (match === null) {
    throw new Error(`"${line}" is no rule for a header: write NAME=VALUE:REVISION, as in x-canary=1:2.`);
  }
  return { name: (match[1] ?? "").toLowerCase(), value: match[2] ?? "", revision: Number(match[3]) };
}

export const WHOLE = 100;

export function sumOf(weights: Readonly<Record<string, number>>): number {
  return Object.values(weights).reduce((sum, weight) => sum + weight, 0);
}

/** What the form sends. Throws Error with what to write instead. */
export function splitBody(form: FormData, revisions: readonly number[]): SplitBody {
  const weights = Object.fromEntries(revisions.map((each) => [String(each), numberOf(form, `weight-${each}`) ?? 0]).filter(([, weight]) => weight !== 0));
  if (sumOf(weights) !== WHOLE) {
    throw new Error(`The weights add up to ${sumOf(weights)} %: they must add up to 100 %.`);
  }
  const mirrored = textOf(form, "mirror");
  return {
    weights,
    headers: textOf(form, "headers").split("\n").map((line) => line.trim()).filter(Boolean).map(ruleOf), // a value may have a comma
    mirror: mirrored ? { revision: Number(mirrored), percent: numberOf(form, "percent") ?? WHOLE, tolerance: numberOf(form, "tolerance") ?? 1e-5 } : null,
    return_if: linesOf(form, "return_if"),
    ...numbersOf(form, ["window_s", "min_calls"]),
  };
}
