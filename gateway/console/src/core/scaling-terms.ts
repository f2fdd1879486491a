/** The numbers behind the wanted number of workers, in words. Pure. */

import { duration, number } from "./format";

export interface Term {
  readonly name: string;
  readonly value: string;
  readonly meaning: string;
}

/** In the order of the computation. The names are those of `gpufn why --verbose`. */
const MEANINGS: Readonly<Record<string, string>> = {
  queued: "calls that wait for a worker",
  running: "calls that workers run",
  calls: "queued and running calls",
  stuck: "cancelled calls that have not stopped yet",
  ready: "workers that take calls",
  starting: "workers that are starting",
  slots: "calls that one worker runs at a time",
  average_in_flight: "queued and running calls, mean of the last minute",
  arrivals_per_s: "calls that arrive",
  service_s: "time that a call runs",
  cold_start_s: "time that a worker takes to start, median",
  idle_s: "time since the last call",
  base: "workers for the mean of the last minute",
  backlog: "calls that the ready workers have no slot for",
  flow: "workers that the arriving calls occupy",
  drain: "workers that the backlog needs, so that it waits no longer than for one more start",
  burst: "workers for the calls of this moment: flow and drain",
  want: "workers that are wanted: the larger of base and burst, within the bounds of the function",
  keep: "workers that stay while calls last: want without the slots that are there already",
  peak: "the highest keep of the last minutes, before workers end",
};

/** The terms in the order of the computation, then those without a meaning here. */
export function scalingTerms(terms: Readonly<Record<string, number>>): Term[] {
  const known = Object.keys(MEANINGS).filter((name) => name in terms);
  const others = Object.keys(terms).filter((name) => !(name in MEANINGS));
  return [...known, ...others].map((name) => ({ name: name.replaceAll("_", " "), value: shown(name, terms[name] ?? 0), meaning: MEANINGS[name] ?? "" }));
}

function shown(name: string, value: number): string {
  if (name.endsWith("_per_s")) {
    return `${number(value)}/s`;
  }
  return name.endsWith("_s") ? duration(value) : number(value);
}
