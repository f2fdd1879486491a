import { expect, test } from "vitest";
import { applied, type Json } from "../src/core/delta";
import { failureIn, grouped } from "../src/core/errors";
import { parsedEvents } from "../src/core/events";
import { hasValues, linesOf } from "../src/core/history";
import { addressOf, href, matched } from "../src/core/route";
import { scalingTerms } from "../src/core/scaling-terms";
import { covers, isNamedBy } from "../src/core/scopes";
import { argumentsFrom, fieldsOf } from "../src/core/signature";
import { optionChanges } from "../src/core/specdiff";

test("a delta sets and removes values, and keeps what did not change", () => {
  const before = { a: { b: 1, c: 2 }, d: { e: 3 } };
  const after = applied(before, [[["a", "b"], 5], [["a", "c"]], [["f"], null]]) as Record<string, Json>;
  expect(after).toEqual({ a: { b: 5 }, d: { e: 3 }, f: null });
  expect(after["d"]).toBe(before.d);
  expect(applied(before, [[[], "new"]])).toBe("new");
});

test("events are complete when their blank line has arrived", () => {
  const first = parsedEvents('event: snapshot\ndata: {"a"');
  expect(first).toEqual({ events: [], rest: 'event: snapshot\ndata: {"a"' });
  const { events, rest } = parsedEvents(`${first.rest}:1}\n\n: waiting\n\nevent: delta\ndata: []\n\nev`);
  expect(events).toEqual([
    { name: "snapshot", data: '{"a":1}' },
    { name: "delta", data: "[]" },
  ]);
  expect(rest).toBe("ev");
});

test("addresses of pages are read and written", () => {
  expect(addressOf("/console", "")).toEqual({ path: "/", query: {} });
  expect(addressOf("/console/functions/prod/search/f/", "?tab=logs")).toEqual({ path: "/functions/prod/search/f", query: { tab: "logs" } });
  expect(addressOf("/console/%E0%A4%A", "").path).toBe("/%E0%A4%A");
  expect(href("/functions/a", { tab: "", search: "x y" })).toBe("/console/functions/a?search=x+y");
  expect(matched("/functions/*name", "/functions/prod/search/f")).toEqual({ name: "prod/search/f" });
  expect(matched("/functions/*name", "/functions")).toBeNull();
  expect(matched("/calls/:id", "/calls/1/2")).toBeNull();
  expect(matched("/", "/")).toEqual({});
});

test.each([
  [["admin"], "deploy", "prod/a/f", true],
  [["read"], "read", "f", true],
  [["read"], "deploy", "f", false],
  [["deploy:prod/*"], "read", "prod/a/f", true],
  [["deploy:prod/*"], "read", "dev/a/f", false],
  [["invoke:*"], "invoke", "prod/a/f", true],
  [["invoke:f"], "invoke", "f", true],
  [["invoke:f"], "invoke", "prod/a/f", false],
  [["read:*/search/*"], "read", "dev/search/f", true],
  [["read:prod/*"], "read", undefined, true],
  [["hi"], "invoke", undefined, false],
] as const)("scopes %j for %s of %s: %s", (scopes, verb, name, expected) => {
  expect(covers(scopes, verb, name)).toBe(expected);
});

test("a variant is named by the pattern of its function", () => {
  expect(isNamedBy("clf", "clf=3f2a9c1b0d")).toBe(true);
});

test("changed options are shown by their path", () => {
  const before = { scaling: { max: 4, min: 0 }, env: ["A"], old: true };
  expect(optionChanges(before, { scaling: { max: 6, min: 0 }, env: ["A", "B"] })).toEqual([
    { option: "env", before: '["A"]', after: '["A","B"]' },
    { option: "old", before: "true", after: "" },
    { option: "scaling.max", before: "4", after: "6" },
  ]);
});

const PARAMETERS = {
  type: "object",
  properties: {
    text: { type: "string" },
    times: { type: "integer", default: 2 },
    flag: { type: "boolean", default: false },
    mode: { enum: ["fast", "good"], type: "string" },
    items: { type: "array", items: { type: "number" } },
    other: { anyOf: [{ type: "integer" }, { type: "null" }] },
  },
  required: ["text", "items"],
};

test("a form has a field for each parameter", () => {
  const fields = fieldsOf(PARAMETERS);
  expect(fields.map(({ name, kind, isRequired, type, initial }) => [name, kind, isRequired, type, initial])).toEqual([
    ["text", "text", true, "string", ""],
    ["times", "integer", false, "integer", "2"],
    ["flag", "boolean", false, "boolean", "false"],
    ["mode", "choice", false, "string", ""],
    ["items", "json", true, "array of number", ""],
    ["other", "json", false, "integer or null", ""],
  ]);
});

test("arguments have the types of their parameters, and optional ones may be left out", () => {
  const fields = fieldsOf(PARAMETERS);
  expect(argumentsFrom(fields, { text: "", items: "[1, 2]", times: "3", flag: "true", mode: "fast", other: "null" })).toEqual({
    text: "", items: [1, 2], times: 3, flag: true, mode: "fast", other: null,
  });
  expect(argumentsFrom(fields, { text: "a", items: "[]" })).toEqual({ text: "a", items: [] });
  expect(() => argumentsFrom(fields, { text: "a" })).toThrow("items");
  expect(() => argumentsFrom(fields, { text: "a", items: "[]", times: "1.5" })).toThrow("times");
  expect(() => argumentsFrom(fields, { text: "a", items: "[" })).toThrow("items");
});

test("failures are grouped by the exception at the end of their traceback", () => {
  const line = { revision: 1, worker: "w", stream: "error", invocation: "c" };
  const failures = [
    { ...line, at: 1, text: 'Traceback:\n  File "a.py"\nValueError: one\n' },
    { ...line, at: 2, text: "KeyError: 'x'\n" },
    { ...line, at: 3, text: 'Traceback:\nValueError: two: more\n' },
    { ...line, at: 4, stream: "stdout", text: "ValueError: no failure" },
  ].map(failureIn);
  const groups = grouped(failures.filter((each) => each !== null));
  expect(groups.map((each) => [each.type, each.count, each.last.message, each.first_at])).toEqual([
    ["ValueError", 2, "two: more", 1],
    ["KeyError", 1, "'x'", 2],
  ]);
});

test("counts of the history are shown per second, and unknown values as gaps", () => {
  const series = [
    { name: "calls", unit: "calls", values: [60, null, 120, 6] },
    { name: "p99", unit: "s", values: [null, null, null, 1] },
  ];
  const history = { from: 0, to: 190, step: 60, at: [0, 60, 120, 180], results: [{ subject: "overview", series }] };
  expect(linesOf(history, ["calls", "p99", "other"])).toEqual([[0, 60, 120], [1, null, 2], [null, null, null], [null, null, null]]);
  expect(hasValues(linesOf(history, ["p99"]))).toBe(false);
  expect(hasValues(linesOf(history, ["calls"]))).toBe(true);
});

test("the numbers of a scale decision are in the order of the computation, with units and words", () => {
  const terms = scalingTerms({ want: 2, service_s: 0.5, arrivals_per_s: 3, other: 1 });
  expect(terms.map((term) => [term.name, term.value])).toEqual([["arrivals per s", "3/s"], ["service s", "500 ms"], ["want", "2"], ["other", "1"]]);
  expect(terms.map((term) => term.meaning === "")).toEqual([false, false, false, true]);
});
