import { expect, test } from "vitest";
import type { Call } from "../src/api/views";
import { placeOf, ticksOf, timelineOf } from "../src/core/timeline";

const CALL: Call = {
  id: "c", function: "f", revision: 1, state: "succeeded", priority: "normal", key: "platform", parent: null, trace: null,
  submitted_at: 100, started_at: 104, ended_at: 106, attempt: 1, worker: "w", progress: null,
  attempts: [{ number: 1, outcome: "succeeded", started_at: 104, ended_at: 106 }],
  queue_s: 4, run_s: 2, gpu_s: 0, timings: { queue_s: 4, place_s: 1, load_s: 2, run_s: 2 },
  size: 1, error: null, waiting: null, place: null, eta_s: null,
};

function spans(call: Call, now = 110): [string, [string, number, number][]][] {
  return timelineOf(call, now).rows.map((row) => [row.label, row.spans.map((each) => [each.kind, each.start, each.end])]);
}

test("a cold start ends when the call starts", () => {
  expect(spans(CALL)).toEqual([
    ["cold start", [["place", 101, 102], ["load", 102, 104]]],
    ["attempt 1", [["queue", 100, 104], ["run", 104, 106]]],
  ]);
});

test("a call that is retried has a row for each attempt, and the open one ends now", () => {
  const call: Call = {
    ...CALL, state: "running", started_at: 107, ended_at: null, attempt: 2, timings: { queue_s: 1 },
    attempts: [{ number: 1, outcome: "raised", started_at: 101, ended_at: 103 }],
  };
  expect(spans(call)).toEqual([
    ["attempt 1", [["queue", 100, 101], ["failed", 101, 103]]],
    ["attempt 2", [["queue", 103, 107], ["run", 107, 110]]],
  ]);
});

test("an attempt that has not started, and a queued call, only wait", () => {
  const lost: Call = { ...CALL, state: "expired", started_at: null, timings: {}, attempts: [{ number: 1, outcome: "expired", ended_at: 106 }] };
  expect(spans(lost)).toEqual([["attempt 1", [["failed", 100, 106]]]]);
  const queued: Call = { ...CALL, state: "queued", started_at: null, ended_at: null, timings: {}, attempts: [] };
  expect(spans(queued)).toEqual([["attempt 1", [["queue", 100, 110]]]]);
});

test("spans are placed within the line, also when clocks differ", () => {
  const timeline = timelineOf(CALL, 110);
  expect(placeOf({ kind: "run", label: "", start: 103, end: 106 }, timeline)).toEqual({ left: 50, width: 50 });
  expect(placeOf({ kind: "run", label: "", start: 90, end: 120 }, timeline)).toEqual({ left: 0, width: 100 });
});

test("the axis has at most six round times", () => {
  expect(ticksOf(6)).toEqual([0, 2, 4, 6]);
  expect(ticksOf(0.01).length).toBeLessThanOrEqual(6);
});
