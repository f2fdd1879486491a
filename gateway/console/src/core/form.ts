/** Values of the fields of a form. Pure. */

export function textOf(form: FormData, name: string): string {
  const value = form.get(name);
  return typeof value === "string" ? value.trim() : "";
}

/** null: the field is empty. */
export function numberOf(form: FormData, name: string): number | null {
  const text = textOf(form, name);
  return text === "" ? null : Number(text);
}

/** The lines of a field, without empty ones. */
export function linesOf(form: FormData, name: string): string[] {
  return textOf(form, name)
    .split(/[\n,]/)
    .map((line) => line.trim())
    .filter(Boolean);
}

/** The fields that are filled in, as numbers. */
export function numbersOf(form: FormData, names: readonly string[]): Record<string, number> {
  return Object.fromEntries(names.flatMap((name) => ((value) => (value === null ? [] : [[name, value]]))(numberOf(form, name))));
}

const UNITS: Readonly<Record<string, number>> = { s: 1, min: 60, h: 3_600, d: 86_400 };

/** The seconds of "30d", "12h", "90min" or "45s"; null if the text is none of these. */
export function secondsOf(text: string): number | null {
  const match = /^(\d+(?:\.\d+)?)\s*(s|min|h|d)$/.exec(text.trim());
  return match ? Number(match[1]) * (UNITS[match[2] ?? ""] ?? 1) : null;
}
