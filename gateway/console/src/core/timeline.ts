/** The life of a call as spans of time. Pure. Times are Unix seconds. */

import type { Call } from "../api/views";

export type SpanKind = "queue" | "place" | "fetch" | "launch" | "load" | "warm" | "resume" | "gather" | "run" | "failed";

export interface Span {
  readonly kind: SpanKind;
  readonly label: string;
  readonly start: number;
  readonly end: number;
}

export interface Row {
  readonly label: string;
  readonly spans: readonly Span[];
}

export interface Timeline {
  readonly start: number;
  readonly end: number;
  readonly rows: readonly Row[];
}

const PHASES: readonly SpanKind[] = ["place", "fetch", "launch", "load", "warm", "resume"];
const SHORTEST_S = 0.001;

/** Return the rows: one for each attempt, and one for the cold start that the last one has waited for. */
export function timelineOf(call: Call, now: number): Timeline {
  const rows: Row[] = [];
  let waitingSince = call.submitted_at;
  for (const attempt of call.attempts) {
    const started = attempt.started_at ?? null;
    const spans: Span[] = [];
    if (started !== null) {
      spans.push(span("queue", attempt.number === 1 ? "queued" : "waits for the retry", waitingSince, started));
      spans.push(...runSpans(call, started, attempt.ended_at, attempt.outcome === "succeeded", attempt.number));
    } else {
      spans.push(span("failed", attempt.outcome.replaceAll("_", " "), waitingSince, attempt.ended_at));
    }
    rows.push({ label: `attempt ${attempt.number}`, spans });
    waitingSince = attempt.ended_at;
  }
  if (call.ended_at === null) {
    rows.push({ label: `attempt ${call.attempt}`, spans: openSpans(call, waitingSince, now) });
  }
  const cold = coldStart(call);
  if (cold.length > 0) {
    rows.splice(Math.max(0, rows.length - 1), 0, { label: "cold start", spans: cold });
  }
  const end = Math.max(call.ended_at ?? now, call.submitted_at + SHORTEST_S);
  return { start: call.submitted_at, end, rows };
}

function runSpans(call: Call, start: number, end: number, succeeded: boolean, number: number): Span[] {
  const gather = number === call.attempt ? (call.timings["gather_s"] ?? 0) : 0;
  const run = span(succeeded ? "run" : "failed", succeeded ? "runs" : "runs, then fails", start + gather, end);
  return gather > 0 ? [span("gather", "gathers a batch", start, start + gather), run] : [run];
}

function openSpans(call: Call, since: number, now: number): Span[] {
  if (call.state === "running" && call.started_at !== null) {
    return [span("queue", "queued", since, call.started_at), span("run", "runs", call.started_at, now)];
  }
  return [span("queue", call.attempt > 1 ? "waits for the retry" : "queued", since, now)];
}

/** The phases of the cold start. They end when the call starts. */
function coldStart(call: Call): Span[] {
  const phases = PHASES.filter((phase) => (call.timings[`${phase}_s`] ?? 0) > 0);
  const total = phases.reduce((sum, phase) => sum + (call.timings[`${phase}_s`] ?? 0), 0);
  let at = (call.started_at ?? call.submitted_at) - total;
  return phases.map((phase) => {
    const start = at;
    at += call.timings[`${phase}_s`] ?? 0;
    return span(phase, phase, start, at);
  });
}

function span(kind: SpanKind, label: string, start: number, end: number): Span {
  return { kind, label, start, end: Math.max(start, end) };
}

/** Where a span is on a line from 0 to 100, cut at both ends. */
export function placeOf(each: Span, timeline: Timeline): { left: number; width: number } {
  const length = timeline.end - timeline.start;
  const left = Math.min(Math.max((each.start - timeline.start) / length, 0), 1);
  const right = Math.min(Math.max((each.end - timeline.start) / length, 0), 1);
  return { left: 100 * left, width: 100 * (right - left) };
}

/** Round times for the axis: at most six, each a multiple of 1, 2 or 5. */
export function ticksOf(length: number): number[] {
  const rough = length / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough) ?? rough;
  return Array.from({ length: Math.floor(length / step) + 1 }, (_, index) => index * step);
}
