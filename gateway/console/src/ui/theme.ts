/** Light or dark: as the system, unless the viewer has chosen. */

const STORED = "gpufn-theme";

export type Theme = "system" | "light" | "dark";

export function theme(): Theme {
  const stored = localStorage.getItem(STORED);
  return stored === "light" || stored === "dark" ? stored : "system";
}

export function setTheme(next: Theme): void {
  if (next === "system") {
    localStorage.removeItem(STORED);
  } else {
    localStorage.setItem(STORED, next);
  }
  applyTheme();
}

export function applyTheme(): void {
  const chosen = theme();
  if (chosen === "system") {
    delete document.documentElement.dataset["theme"];
  } else {
    document.documentElement.dataset["theme"] = chosen;
  }
  dispatchEvent(new Event("gpufn-theme"));
}
