import { expect, test } from "vitest";
import { begun, extended, inserted, polled, reread, updated, type LiveList } from "../src/core/data/live-list";

interface Each {
  readonly id: string;
  readonly state?: string;
}

const rows = (text: string): Each[] => [...text].map((id) => ({ id }));
const text = (list: LiveList<Each>): string => [list.waiting, list.shown].map((each) => each.map(({ id }) => id).join("")).join("|");

test("rows that new ones push off the first page stay, and new ones wait", () => {
  let list = polled(begun(rows("dcb")), rows("edc"));
  expect(text(list)).toBe("e|dcb");
  list = polled(list, rows("gfe"));
  expect(text(list)).toBe("gfe|dcb");
  expect(list.hasGap).toBe(false);
  expect(text(inserted(list))).toBe("|gfedcb");
});

test("rows are updated where they are", () => {
  const list = polled(begun(rows("ba")), [{ id: "c" }, { id: "a", state: "failed" }]);
  expect(list.shown).toEqual([{ id: "b" }, { id: "a", state: "failed" }]);
  expect(updated(list, [{ id: "c", state: "running" }]).waiting).toEqual([{ id: "c", state: "running" }]);
});

test("a page that knows no row means that rows between were not read", () => {
  expect(polled(begun(rows("ba")), rows("zy")).hasGap).toBe(true);
  expect(polled(begun(rows("ba")), []).hasGap).toBe(false);
  const many = Array.from({ length: 300 }, (_, index) => ({ id: `n${index}` }));
  const list = polled(begun(rows("ba")), [...many, { id: "b" }]);
  expect([list.waiting.length, list.hasGap]).toEqual([200, true]);
});

test("an empty list shows new rows at once", () => {
  expect(text(polled(begun<Each>([]), rows("ba")))).toBe("|ba");
});

test("older rows follow, each once", () => {
  expect(text(extended(polled(begun(rows("cb")), rows("dc")), rows("dba")))).toBe("d|cba");
});

test.each([
  ["rows that new ones push off the end stay", "cba", "dcb", false, "d|cba"],
  ["rows that were deleted leave, and older ones follow", "dcb", "dba", false, "|dba"],
  ["rows that are missing in the whole list were deleted", "cba", "cb", true, "|cb"],
  ["an empty answer leaves no row", "cba", "", true, "|"],
  ["a longer answer has older rows", "dc", "edcba", false, "e|dcba"],
  ["new rows instead of all others are shown", "ba", "dc", true, "|dc"],
])("a list that is read again: %s", (_, before, page, isWhole, after) => {
  expect(text(reread(begun(rows(before)), rows(page), isWhole))).toBe(after);
});

test("a waiting row that was deleted no longer waits", () => {
  const list = reread(begun(rows("ba")), rows("dcba"), true);
  expect(text(list)).toBe("dc|ba");
  expect(text(reread(list, rows("cba"), true))).toBe("c|ba");
});

test("answers that know no row leave a gap, and no row leaves", () => {
  const list = reread(begun(rows("ba")), rows("zy"), false);
  expect([text(list), list.hasGap]).toEqual(["zy|ba", true]);
});
