import { expect, test } from "vitest";
import { below, chainOf, criticalPath, lanesOf, nested, shares, verdictOf, type Item, type PathSpan } from "../src/core/path/critical";

const span = (id: string, parent: string | null, start: number, end: number): PathSpan => ({ id, parent, name: id, start, end });

const CALL = span("call", null, 0, 10);
const SPANS = [CALL, span("queue", "call", 0, 1), span("run", "call", 1, 10), span("slow", "run", 2, 8), span("fast", "run", 2, 5), span("inner", "slow", 3, 4), span("lost", "gone", 0, 1)];

test("spans are below their parents, by their start", () => {
  expect(nested(SPANS).map(({ span: each, depth }) => [each.id, depth])).toEqual([
    ["call", 0],
    ["queue", 1],
    ["run", 1],
    ["slow", 2],
    ["inner", 3],
    ["fast", 2],
    ["lost", 0],
  ]);
  expect(below(SPANS, "slow").map((each) => each.id)).toEqual(["slow", "inner"]);
  expect(below(SPANS, "nobody")).toEqual([]);
});

test("the path goes through the span that ended last, and has no gap", () => {
  const parts = criticalPath(SPANS, CALL);
  expect(parts.map((each) => [each.id, each.start, each.end])).toEqual([
    ["queue", 0, 1],
    ["run", 1, 2],
    ["slow", 2, 3],
    ["inner", 3, 4],
    ["slow", 4, 8],
    ["run", 8, 10],
  ]);
  expect(shares(parts)[0]).toEqual({ id: "slow", seconds: 5 });
});

test("of calls one after another each is on the path; one that outlives its caller is not", () => {
  const spans = [CALL, span("a", "call", 1, 3), span("b", "call", 4, 6), span("later", "call", 5, 20)];
  expect(criticalPath(spans, CALL).map((each) => each.id)).toEqual(["call", "a", "call", "b", "call"]);
});

test("the path covers the whole time, whatever the spans are", () => {
  for (let seed = 1; seed <= 50; seed += 1) {
    const random = (number: number): number => ((seed * 7919 + number * 104_729) % 997) / 99.7;
    const spans = Array.from({ length: 12 }, (_, index) => {
      const [one, other] = [random(index), random(index + 100)];
      return span(`s${index}`, index % 3 ? `s${Math.floor(index / 3)}` : "call", Math.min(one, other), Math.max(one, other));
    });
    const parts = criticalPath([CALL, ...spans], CALL);
    expect(parts.reduce((sum, each) => sum + each.end - each.start, 0)).toBeCloseTo(10);
    expect(parts.every((each, index) => index === 0 || Math.abs(each.start - (parts[index - 1]?.end ?? 0)) < 1e-9)).toBe(true);
  }
});

const item = (id: string, worker: string, start: number, end: number): Item => ({ id, worker, start, end });
const ITEMS = [item("0", "a", 0, 2), item("1", "b", 0, 1), item("2", "b", 1, 5), item("3", "a", 2, 3), item("4", "b", 3, 4)];

test("items have a line per worker, and a further one if they run at the same time", () => {
  expect(lanesOf(ITEMS).map((lane) => [lane.worker, lane.items.map((each) => each.id)])).toEqual([
    ["a", ["0", "3"]],
    ["b", ["1", "2"]],
    ["b", ["4"]],
  ]);
});

test("the chain leads from the item that ended last back over its worker", () => {
  expect(chainOf(ITEMS).map((each) => each.id)).toEqual(["1", "2"]);
  expect(chainOf([])).toEqual([]);
});

test.each([
  ["straggler", [item("0", "a", 0, 1), item("1", "a", 1, 2), item("2", "a", 2, 9)]],
  ["saturated", [item("0", "a", 0, 1), item("1", "a", 1, 2), item("2", "a", 2, 3)]],
  ["waiting", [item("0", "a", 0, 1), item("1", "a", 5, 6)]],
  ["waiting", []],
])("a map is %s", (verdict, items) => {
  expect(verdictOf(chainOf(items), items)).toBe(verdict);
});

test("bug: spans that name each other as parents kept the page busy for ever", () => {
  const circle = [span("a", "b", 0, 10), span("b", "a", 0, 10), span("c", "a", 1, 2)];
  expect(below(circle, "a").map((each) => each.id)).toEqual(["a", "c"]);
  expect(nested(circle)).toHaveLength(3);
  expect(criticalPath(circle, span("a", "b", 0, 10)).map((each) => each.id)).toEqual(["a", "c", "a"]);
});
