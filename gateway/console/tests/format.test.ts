import { expect, test } from "vitest";
import { ago, bytes, duration, number, percent, visible } from "../src/core/format";

test.each([
  [null, "–"],
  [0, "0 s"],
  [0.0000123, "12.3 µs"],
  [0.0123, "12.3 ms"],
  [59.94, "59.9 s"],
  [60, "1 min"],
  [3725, "1 h 2 min"],
  [90_061, "1 d 1 h"],
  [-2, "-2 s"],
])("the duration %s is shown as %s", (seconds, text) => {
  expect(duration(seconds)).toBe(text);
});

test("numbers have three digits and a separator of thousands", () => {
  expect([0, 0.00123, 0.456, 12.34, 1234.5, 1e6].map(number)).toEqual(["0", "0.0012", "0.46", "12.3", "1,235", "1,000,000"]);
});

test("a small share is not shown as zero", () => {
  expect([0, 0.0001, 0.0123, 0.25, 1].map(percent)).toEqual(["0 %", "< 0.1 %", "1.2 %", "25 %", "100 %"]);
});

test("bytes are shown in units of 1024", () => {
  expect([5, 2048, 24 * 1024 ** 3].map(bytes)).toEqual(["5 B", "2 KiB", "24 GiB"]);
});

test("times are shown as their distance", () => {
  expect([ago(100, 100.4), ago(90, 100), ago(40, 100), ago(null, 100)]).toEqual(["just now", "10 s ago", "1 min ago", "–"]);
});

test("colours of terminals are removed, and invisible characters and turns of the direction are shown as codes", () => {
  expect(visible("\u001b[31mred\u001b[0m")).toBe("red");
  expect(visible("\u001b]0;title\u0007text")).toBe("text");
  expect(visible("a\u202eb\u0000c\u200d")).toBe("a\\u202eb\\u0000c\\u200d");
  expect(visible("line\n\tnext <script>")).toBe("line\n\tnext <script>");
});
