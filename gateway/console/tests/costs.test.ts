import { expect, test } from "vitest";
import { energy, money } from "../src/core/format";
import { chargedTo, existingNames, TEMPORARY } from "../src/core/operate/charged";
import { barsOf, folded, NO_COST, ordered, sumOf, type Cost } from "../src/core/operate/costs";

const cost = (fields: Partial<Cost>): Cost => ({ ...NO_COST, ...fields });

test("unknown energy stays unknown in a sum", () => {
  expect(sumOf([cost({ total: 1 }), cost({ total: 2 })])).toMatchObject({ total: 3, joules: null });
  expect(sumOf([cost({ joules: 2 }), cost({}), cost({ joules: 3, co2_g: 1 })])).toMatchObject({ joules: 5, co2_g: 1 });
});

test("groups are ordered by cost, then by time; days by date", () => {
  const rows = [cost({ function: "b" }), cost({ function: "a" }), cost({ function: "busy", gpu_used_s: 5 }), cost({ function: "dear", total: 1 })];
  expect(ordered(rows, "function").map((row) => row.function)).toEqual(["dear", "busy", "a", "b"]);
  expect(ordered([cost({ day: "2026-11-01" }), cost({ day: "2026-11-02", total: 0 })], "day").map((row) => row.day)).toEqual(["2026-11-02", "2026-11-01"]);
});

test("a day without a cost has an empty bar, and without prices bars are times", () => {
  const costs = [cost({ day: "2026-11-02", used: 2, idle: 1, gpu_used_s: 60, gpu_idle_s: 30 })];
  const days = ["2026-11-01", "2026-11-02"];
  expect(barsOf(days, costs, true).map((each) => each.values)).toEqual([[0, 0, 0, 0], [1, 2, 0, 0]]);
  expect(barsOf(days, costs, false).map((each) => each.values)).toEqual([[0, 0], [30, 60]]);
});

test.each([
  [0, "0"],
  [0.000123456, "< 0.01"],
  [0.5, "0.50"],
  [1234.567, "1,234.57"],
])("%f is the amount %s", (amount, text) => expect(money(amount)).toBe(text));

test("energy has the unit that fits", () => expect([energy(null), energy(3600), energy(7.2e6)]).toEqual(["–", "1 Wh", "2 kWh"]));

test("temporary functions that have ended are one row, and variants count as their function", () => {
  const existing = existingNames([{ name: "dev-ada/default/f" }, { name: "clf" }]);
  const names = ["clf=3f2a9c1b0d", "run-3c31j5szwv/default/f", "run-fast/default/f", "dev-ada/default/f", "dev-ada/default/gone", "dev-ada/default", "dev-bob/default"];
  expect(names.map((name) => chargedTo(name, existing))).toEqual(["clf", TEMPORARY, "run-fast/default/f", "dev-ada/default/f", TEMPORARY, "dev-ada/default", TEMPORARY]);
  expect(chargedTo("dev-ada/default/gone", null)).toBe("dev-ada/default/gone");
});

test("rows that are charged to the same name are added up", () => {
  const costs = [cost({ function: "run-3c31j5szwv/default/f", calls: 1, total: 1 }), cost({ function: "run-3c31j5szwx/default/f", calls: 2, total: 2 }), cost({ function: "g", calls: 4 })];
  const rows = folded(costs, "function", (name) => chargedTo(name, null));
  expect(rows.map((row) => [row.function, row.calls, row.total])).toEqual([[TEMPORARY, 3, 3], ["g", 4, 0]]);
});
