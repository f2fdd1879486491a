/** Numbers, times and texts as a page shows them. Pure. `null` means unknown or none, and is shown as a dash. */

export const NONE = "–";

type Maybe<T> = T | null | undefined;

/** Three significant digits, with the separator of thousands: 0.0123, 4.56, 1,230. */
export function number(value: Maybe<number>): string {
  if (value === null || value === undefined) {
    return NONE;
  }
  const digits = Math.abs(value) >= 100 || Number.isInteger(value) ? 0 : Math.abs(value) >= 10 ? 1 : 2;
  if (value !== 0 && Math.abs(value) < 0.01) {
    return value.toPrecision(2);
  }
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

export function percent(share: Maybe<number>): string {
  if (share === null || share === undefined) {
    return NONE;
  }
  if (share > 0 && share < 0.001) {
    return "< 0.1 %";
  }
  return `${(share * 100).toLocaleString("en", { maximumFractionDigits: share < 0.1 ? 1 : 0 })} %`;
}

const UNITS: readonly (readonly [number, string])[] = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "min"],
];

/** A duration: 12 ms, 3.4 s, 5 min 10 s, 2 h 3 min. */
export function duration(seconds: Maybe<number>): string {
  if (seconds === null || seconds === undefined) {
    return NONE;
  }
  if (seconds < 0) {
    return `-${duration(-seconds)}`;
  }
  if (seconds === 0) {
    return "0 s";
  }
  if (seconds < 0.001) {
    return `${number(seconds * 1e6)} µs`;
  }
  if (seconds < 1) {
    return `${number(seconds * 1e3)} ms`;
  }
  if (seconds < 60) {
    return `${number(seconds)} s`;
  }
  for (const [index, [size, unit]] of UNITS.entries()) {
    if (seconds >= size) {
      const whole = Math.floor(seconds / size);
      const [nextSize, nextUnit] = UNITS[index + 1] ?? [1, "s"];
      const rest = Math.floor((seconds - whole * size) / nextSize);
      return rest ? `${whole} ${unit} ${rest} ${nextUnit}` : `${whole} ${unit}`;
    }
  }
  return `${number(seconds)} s`;
}

export function bytes(count: Maybe<number>): string {
  if (count === null || count === undefined) {
    return NONE;
  }
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${number(value)} ${units[unit] ?? ""}`;
}

export function energy(joules: Maybe<number>): string {
  if (joules === null || joules === undefined) {
    return NONE;
  }
  return joules < 3.6e6 ? `${number(joules / 3600)} Wh` : `${number(joules / 3.6e6)} kWh`;
}

/** An amount of money without its currency: 1,234.57, 0.50, < 0.01. */
export function money(amount: Maybe<number>): string {
  if (amount === null || amount === undefined) {
    return NONE;
  }
  if (amount === 0) {
    return "0";
  }
  return amount > 0 && amount < 0.005 ? "< 0.01" : amount.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });
}

/** How long ago a time in Unix seconds was. */
export function ago(at: Maybe<number>, now: number): string {
  if (at === null || at === undefined) {
    return NONE;
  }
  const seconds = now - at;
  return seconds < 1 ? "just now" : `${coarse(seconds)} ago`;
}

function coarse(seconds: number): string {
  const [size, unit] = UNITS.find(([unitSize]) => seconds >= unitSize) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

/** A time in the zone of the viewer. */
export function time(at: Maybe<number>): string {
  return at === null || at === undefined ? NONE : new Date(at * 1000).toLocaleString(undefined, { hour12: false });
}

/** The time of a day, with milliseconds. */
export function clock(at: number): string {
  const date = new Date(at * 1000);
  return `${date.toLocaleTimeString(undefined, { hour12: false })}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

/** The states in which there are workers: "2 ready, 1 starting". */
export function counts(workers: Readonly<Record<string, number>>): string {
  const parts = Object.entries(workers).map(([state, count]) => `${count} ${state}`);
  return parts.join(", ") || "0";
}

export function plural(count: number, noun: string, nouns = `${noun}s`): string {
  return `${count.toLocaleString("en")} ${count === 1 ? noun : nouns}`;
}

const CONTROLS = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;
const TERMINAL = /\u001b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\u0007\u001b]*(?:\u0007|\u001b\\)|[@-Z\\-_])/g;

/** Text of users without colours of terminals. Other invisible characters, and those that turn the direction of text, are shown as their codes. */
export function visible(text: string): string {
  return text
    .replace(TERMINAL, "")
    .replace(CONTROLS, (each) => `\\u${each.charCodeAt(0).toString(16).padStart(4, "0")}`);
}
