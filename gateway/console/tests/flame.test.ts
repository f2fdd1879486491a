import { expect, test } from "vitest";
import { boxesOf, colorOf, isOfPlatform, neighbour, textOf, topOf, treeOf, type Speedscope } from "../src/core/profile/flame";

const FRAMES = [
  { name: "main", file: "m.py", line: 1 },
  { name: "f", file: "m.py", line: 5 },
  { name: "f", file: "m.py", line: 7 },
  { name: "g", file: "n.py", line: 2 },
];

function profile(unit: "seconds" | "bytes", ...stacks: [number[], number][]): Speedscope {
  return { name: "p", shared: { frames: FRAMES }, profiles: [{ unit, samples: stacks.map(([stack]) => stack), weights: stacks.map(([, weight]) => weight) }] };
}

const root = treeOf(profile("seconds", [[0, 1], 1], [[0, 2, 3], 3], [[0, 3], 4], [[0], 2]));

test("lines of a function count together, except in a profile of memory", () => {
  const main = root.children[0];
  expect(main?.children.map((each) => [textOf(each.frame), each.total, each.own])).toEqual([
    ["f (m.py)", 4, 1],
    ["g (n.py)", 4, 4],
  ]);
  const bytes = treeOf(profile("bytes", [[0, 1], 1], [[0, 2], 3]));
  expect(bytes.children[0]?.children.map((each) => textOf(each.frame))).toEqual(["f (m.py:7)", "f (m.py:5)"]);
});

test("boxes are within the box of their caller", () => {
  expect(boxesOf(root).map(({ node, left, width }) => [node.frame.name, left, Math.round(width * 1e9) / 1e9])).toEqual([
    ["all", 0, 1],
    ["main", 0, 1],
    ["f", 0, 0.4],
    ["g", 0.4, 0.4],
    ["g", 0, 0.3],
  ]);
});

test("a chosen frame has the whole width, below its callers", () => {
  const f = root.children[0]?.children[0];
  expect(f && boxesOf(f).map(({ node, width }) => [node.frame.name, width])).toEqual([
    ["all", 1],
    ["main", 1],
    ["f", 1],
    ["g", 0.75],
  ]);
});

test("frames too narrow to see are left out, and deep stacks are bounded", () => {
  const narrow = treeOf(profile("seconds", [[0], 10_000], [[3], 1]));
  expect(boxesOf(narrow).map(({ node }) => node.frame.name)).toEqual(["all", "main"]);
  const deep = treeOf(profile("seconds", [Array.from({ length: 5_000 }, (_, index) => index % 4), 1]));
  expect(boxesOf(deep)).toHaveLength(2_000);
});

test("a recursive function counts once per stack", () => {
  expect(topOf(treeOf(profile("seconds", [[3, 0, 3], 2], [[3], 1])), 1)).toMatchObject([{ frame: { name: "g" }, own: 3, total: 3 }]);
});

test("an empty profile has only its root", () => {
  const empty = treeOf(profile("seconds"));
  expect([boxesOf(empty).length, topOf(empty, 5)]).toEqual([1, []]);
});

test("keys lead to callers, calls and neighbours", () => {
  const main = root.children[0]!;
  const [f, g] = main.children;
  expect([neighbour(main, "ArrowUp"), neighbour(main, "ArrowDown"), neighbour(f!, "ArrowRight"), neighbour(f!, "ArrowLeft"), neighbour(f!, "x")]).toEqual([root, f, g, null, null]);
});

test("frames of a file have one colour, and those of the platform are known", () => {
  expect([isOfPlatform({ name: "f", file: "gpufn_runtime/a.py" }), isOfPlatform(FRAMES[0]!), isOfPlatform({ name: "f" })]).toEqual([true, false, false]);
  expect(colorOf(FRAMES[0]!, 6)).toBe(colorOf(FRAMES[1]!, 6));
});
