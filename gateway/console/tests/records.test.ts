import { expect, test } from "vitest";
import type { Gpu } from "../src/api/views";
import { EMPTY_CHAIN, START, withRecord, writtenElements, type AuditRecord } from "../src/core/operate/audit";
import { linesOf, numbersOf, secondsOf } from "../src/core/form";
import { heatClass, heatOf } from "../src/core/operate/heat";
import { limitsText, rateOf, rateText } from "../src/core/operate/limits";
import { endedOf, NO_OUTCOMES, withLines } from "../src/core/data/outcomes";
import { latencyPlot, partOfLimit, worstOutputs, type Candidate, type OutputRow, type Report } from "../src/core/operate/report";
import { coversEverything, coversPattern } from "../src/core/scopes";
import { failureOf, hostOf } from "../src/core/login";
import { ruleText, splitBody, splitText } from "../src/core/traffic";
import { subjectOf } from "../src/core/operate/time-line";
import { ancestors, folderOf } from "../src/core/data/tree";
import { daysFrom, totals } from "../src/core/operate/usage";

test("records of the audit log are taken as they are written", () => {
  const records = ['{"seq":1,"a":"} ] , \\" {"}', '{"seq":2,"details":{"x":[1,2]},"at":1.0}'];
  expect(writtenElements(`{"records":[${records.join(",")}],"head":{"seq":2}}`, "records")).toEqual(records);
  expect(writtenElements('{"records":[],"head":null}', "records")).toEqual([]);
});

function chainOf(...records: (Partial<AuditRecord> & { hash: string })[]) {
  return records.reduce((chain, { hash, ...record }) => withRecord(chain, record as AuditRecord, hash, "b"), EMPTY_CHAIN);
}

test.each([
  ["an intact log", [{ seq: 1, previous: START, hash: "a" }, { seq: 2, previous: "a", hash: "b" }], null],
  ["a log whose old records have expired", [{ seq: 7, previous: "x", hash: "a" }, { seq: 8, previous: "a", hash: "b" }], null],
  ["a changed record", [{ seq: 1, previous: START, hash: "other" }, { seq: 2, previous: "a", hash: "b" }], 2],
  ["a missing record", [{ seq: 1, previous: START, hash: "a" }, { seq: 3, previous: "a", hash: "b" }], 2],
  ["a first record that is not the first", [{ seq: 1, previous: "x", hash: "a" }], 1],
])("the chain of %s", (_, records, fault) => {
  const chain = chainOf(...records);
  expect(chain.fault?.seq ?? null).toBe(fault);
  expect(chain.hasNoted).toBe(fault === null);
});

const GPU: Gpu = {
  kind: "NVIDIA L4",
  memory_bytes: 100,
  health: "healthy",
  health_reason: "",
  score: { value: 1, reasons: [], drain: false },
  parent: "",
  foreign_bytes: 0,
  workers: {},
  mode: null,
  utilisation: 0.25,
  memory_used_bytes: 50,
  temperature_c: 60,
  temperature_limit_c: null,
  power_w: 36,
  power_limit_w: 72,
};

test("metrics of a GPU are shares of their limits", () => {
  expect(heatOf("compute", GPU)).toEqual({ share: 0.25, text: "25 %" });
  expect(heatOf("memory", GPU).share).toBe(0.5);
  expect(heatOf("temperature", GPU)).toEqual({ share: 0.5, text: "60 °C" });
  expect(heatOf("power", GPU)).toEqual({ share: 0.5, text: "36 W" });
  expect(heatOf("power", { ...GPU, power_limit_w: null }).share).toBeNull();
  expect(heatOf("temperature", { ...GPU, temperature_c: 200 }).share).toBe(1);
  expect([heatClass(null), heatClass(0), heatClass(1)]).toEqual(["heat-none", "heat-0", "heat-10"]);
});

test("the fields of a form are lines, numbers and times", () => {
  const form = new FormData();
  form.set("scopes", " read:prod/*\n\nhi, pickle ");
  form.set("queued", "5");
  form.set("run_s", "");
  expect(linesOf(form, "scopes")).toEqual(["read:prod/*", "hi", "pickle"]);
  expect(numbersOf(form, ["queued", "run_s", "absent"])).toEqual({ queued: 5 });
  expect(["30d", "12h", "90min", "45s", "1.5h"].map(secondsOf)).toEqual([2_592_000, 43_200, 5_400, 45, 5_400]);
  expect(["", "12", "h", "-3d", "5 weeks"].map(secondsOf)).toEqual([null, null, null, null, null]);
});

test("limits are written as the command line writes them", () => {
  expect([50, 1.5, 1000 / 3600].map(rateText)).toEqual(["50/s", "90/min", "1000/h"]);
  expect(["50/s", "90/min", "0/s", "x"].map(rateOf)).toEqual([50, 1.5, null, null]);
  expect(limitsText({ rate: 50, burst: 100, gpu_s: 60 })).toBe("50/s (burst 100), 60 GPU s/day");
  expect(limitsText({ rate: null })).toBe("none");
});

test("outcomes are counted by state, and the results are not kept", () => {
  const lines = ['{"index":0,"state":"succeeded","result":"x"}', '{"index":1,"state":"failed","error":{"code":"function_raised","detail":"no"}}', ""];
  const outcomes = withLines(withLines(NO_OUTCOMES, lines), ['{"index":2,"state":"cancelled"}']);
  expect(outcomes.counts).toEqual({ succeeded: 1, failed: 1, cancelled: 1 });
  expect(outcomes.failed.map((each) => each.index)).toEqual([1, 2]);
  expect(endedOf(outcomes)).toBe(3);
  const many = withLines(NO_OUTCOMES, Array.from({ length: 1000 }, (_, index) => JSON.stringify({ index, state: "failed" })));
  expect([many.counts["failed"], many.failed.length]).toEqual([1000, 200]);
});

function output(rel_l2: number | null, difference: number | null, limit: number | null): OutputRow {
  const worst_element = { value: "1", reference: "1", difference, limit };
  return { case: "c", name: "y", dtype: "float32", max_abs: 0, p999_abs: 0, rel_l2, cosine: 1, argmax: 1, worst_element, passes_fp32: true };
}

function candidate(backend: string, quantiles: readonly number[], outputs: readonly OutputRow[] = [], reason = ""): Candidate {
  const latency = { p50_s: 1, p90_s: 2, p99_s: 3, per_s: 1, settled: true };
  return { backend, key: "", found: false, reason, log: "", size: 0, flags: {}, versions: {}, accuracy: null, outputs, latency, quantiles_s: quantiles, gpu_nodes: 0, cpu_nodes: 0, notes: [], remarks: [] };
}

test("the plot of latencies is linear from zero, or logarithmic for long tails", () => {
  const linear = latencyPlot([candidate("a", [0.001, 0.0011, 0.0014])]);
  expect(linear?.curves[0]?.points.map(([share]) => share)).toEqual([0, 0.5, 1]);
  expect(linear?.ticks[0]).toEqual([0, 0]);
  const logarithmic = latencyPlot([candidate("a", [0.0001, 0.005, 0.01]), candidate("b", [])]);
  expect(logarithmic?.ticks.length).toBe(6);
  expect(logarithmic?.curves[1]?.points.map(([share]) => share)).toEqual([0.5, 0.9, 0.99]);
  expect(latencyPlot([])).toBeNull();
});

test("the largest errors come first, without those of rejected candidates", () => {
  const report = { candidates: [candidate("a", [], [output(0.1, 1, 2), output(null, 1, 0)]), candidate("b", [], [output(9, 1, 1)], "too slow")] } as unknown as Report;
  expect(worstOutputs(report).map(({ output: each }) => each.rel_l2)).toEqual([null, 0.1]);
  expect([output(0, 1, 2), output(0, 1, 0), output(0, 0, 0), output(0, 1, null)].map(partOfLimit)).toEqual([0.5, Infinity, 0, null]);
});

test("a folder has its folders with their sizes, then its files", () => {
  const files = ["b.txt", "a/x.bin", "a/b/y.bin", "ab/z.bin"].map((path) => ({ path, size: 2, digest: "d" }));
  expect(folderOf(files, "").folders).toEqual([
    { name: "a", files: 2, bytes: 4 },
    { name: "ab", files: 1, bytes: 2 },
  ]);
  expect(folderOf(files, "a").files.map((each) => each.name)).toEqual(["x.bin"]);
  expect(ancestors("a/b")).toEqual(["a", "a/b"]);
  expect(ancestors("")).toEqual([]);
});

test("usage is summed by function, key or day", () => {
  const row = (day: string, name: string, gpu_s: number, joules: number | null) => ({ day, function: name, key: "k", usage: { calls: 1, failed: 0, run_s: 1, gpu_s, joules } });
  const rows = [row("2026-11-02", "f", 1, null), row("2026-11-01", "f", 1, 5), row("2026-11-01", "g", 9, null)];
  expect(totals(rows, "function").map((each) => [each.name, each.calls, each.joules])).toEqual([["g", 1, null], ["f", 2, 5]]);
  expect(totals(rows, "day").map((each) => [each.name, each.gpu_s])).toEqual([["2026-11-01", 10], ["2026-11-02", 1]]);
  expect(daysFrom("2026-02-27", "2026-03-01")).toEqual(["2026-02-27", "2026-02-28", "2026-03-01"]);
});

test.each([
  [["admin"], "prod/*", true, true],
  [["deploy"], "*", true, true],
  [["deploy:prod/*"], "prod/*", true, false],
  [["deploy:prod/*"], "prod/search/*", true, false],
  [["deploy:prod/search/*"], "prod/search/*", true, false],
  [["deploy:prod/search/*"], "prod/*", false, false],
  [["deploy:prod/search/predict"], "prod/search/*", false, false],
  [["deploy:prod/*"], "*", false, false],
  [["read"], "*", false, false],
])("the scopes %j for what belongs to %s", (scopes, pattern, isCovered, isForEverything) => {
  expect(coversPattern(scopes, "deploy", pattern)).toBe(isCovered);
  expect(coversEverything(scopes, "deploy")).toBe(isForEverything);
});

test("an event names what it is about", () => {
  expect(subjectOf("function:prod/search/predict")).toEqual({ kind: "function", name: "prod/search/predict" });
  expect(subjectOf("gpu:GPU-1")).toEqual({ kind: "gpu", name: "GPU-1" });
});

function formOf(fields: Readonly<Record<string, string>>): FormData {
  const form = new FormData();
  Object.entries(fields).forEach(([name, value]) => form.set(name, value));
  return form;
}

test("a form of a split becomes its setting, and its rules read as on the command line", () => {
  const fields = { "weight-1": "90", "weight-2": "10", "weight-3": "", headers: "X-Canary=a,b:c:2\n", return_if: "errors>2%\n p99>1.5x", mirror: "2", percent: "5", window_s: "30" };
  const body = splitBody(formOf(fields), [1, 2, 3]);
  expect(body).toEqual({
    weights: { 1: 90, 2: 10 },
    headers: [{ name: "x-canary", value: "a,b:c", revision: 2 }],
    mirror: { revision: 2, percent: 5, tolerance: 1e-5 },
    return_if: ["errors>2%", "p99>1.5x"],
    window_s: 30,
  });
  expect(body.headers.map(ruleText)).toEqual(["x-canary=a,b:c:2"]);
  expect(splitText({ weights: body.weights, mirror: null })).toBe("1=90 %, 2=10 %");
  expect(splitText({ weights: { 2: 100 }, mirror: 3 })).toBe("2=100 %, copies to 3");
});

test.each([
  [{ "weight-1": "90", "weight-2": "20" }, /110 %/],
  [{ "weight-1": "100", headers: "x-canary:2" }, /NAME=VALUE:REVISION/],
])("a form that is no split says what to write: %j", (fields, message) => {
  expect(() => splitBody(formOf(fields), [1, 2])).toThrow(message);
});

test("only known outcomes of a login are shown", () => {
  expect(failureOf("#login=no-role")).toMatch(/no role/);
  expect(failureOf("#login=<b>x</b>")).toBe("");
  expect(failureOf("#ticket=a")).toBe("");
  expect(failureOf("#login=constructor")).toBe("");
  expect(hostOf("https://login.example.org/realms/a")).toBe("login.example.org");
  expect(hostOf("x")).toBe("x");
});
