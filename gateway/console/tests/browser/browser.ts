/** Chromium, the platform under test, and checks that hold for every page. */

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium, type Browser, type Page } from "playwright-core";
import { expect } from "vitest";

const FLAGS = [
  "--no-sandbox", // CI runs as root
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const AXE = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];

export const URL = required("GPUFN_TEST_URL");
export const HOME = required("GPUFN_TEST_HOME");
const SCREENSHOTS = process.env["GPUFN_TEST_SCREENSHOTS"] ?? "";
export const takesScreenshots = SCREENSHOTS !== "";

function required(name: string): string {
  const value = process.env[name];
  if (!value) {
    throw new Error(`${name} is not set: run tests/e2e/test_console.py`);
  }
  return value;
}

export function launch(): Promise<Browser> {
  return chromium.launch({ executablePath: process.env["GPUFN_TEST_CHROMIUM"] ?? "/usr/bin/chromium", args: FLAGS });
}

export interface Options {
  readonly colorScheme?: "light" | "dark";
  readonly width?: number;
  readonly height?: number;
}

/** A page in a browser without cookies. What the page reports as wrong fails the test. */
export async function newPage(browser: Browser, { colorScheme = "light", width = 1280, height = 800 }: Options = {}): Promise<Page> {
  // Axe is injected past the policy of the page, which the other tests keep.
  const context = await browser.newContext({ colorScheme, viewport: { width, height }, locale: "en-GB", timezoneId: "Europe/Berlin" });
  const page = await context.newPage();
  page.on("pageerror", (error) => {
    throw error;
  });
  return page;
}

export async function open(page: Page, path: string): Promise<void> {
  await page.goto(`${URL}/console${path}`);
}

/** Check the page against WCAG 2.2 AA, and that it is not wider than the screen. */
export async function checkAccessibility(page: Page): Promise<void> {
  await page.evaluate(AXE); // over the debugger: the policy of the page forbids it to scripts of the page
  const violations = await page.evaluate(async (tags) => {
    const axe = (globalThis as unknown as { axe: { run(options: object): Promise<{ violations: { id: string; nodes: { html: string; failureSummary: string }[] }[] }> } }).axe;
    const { violations: found } = await axe.run({ runOnly: { type: "tag", values: tags }, resultTypes: ["violations"] }); // no details of what passes
    return found.map(({ id, nodes }) => `${id}: ${nodes.map((node) => `${node.html} ${node.failureSummary}`).join("; ")}`);
  }, WCAG);
  expect(violations).toEqual([]);
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
  expect(overflow).toBeLessThanOrEqual(0);
}

export async function screenshot(page: Page, name: string): Promise<void> {
  if (takesScreenshots) {
    await page.screenshot({ path: `${SCREENSHOTS}/console-${name}.png` });
  }
}

/** A request to the API, as a program sends it. */
export async function api(method: string, path: string, json?: unknown, key = ""): Promise<unknown> {
  const headers: Record<string, string> = { "content-type": "application/json" };
  if (key) {
    headers["authorization"] = `Bearer ${key}`;
  }
  const init: RequestInit = { method, headers };
  if (json !== undefined) {
    init.body = JSON.stringify(json);
  }
  const response = await fetch(URL + path, init);
  if (!response.ok) {
    throw new Error(`${method} ${path}: HTTP ${response.status} ${await response.text()}`);
  }
  return response.status === 204 ? null : response.json();
}

export function pidOf(process: string): number {
  const state = JSON.parse(readFileSync(`${HOME}/up.json`, "utf8")) as { pids: Record<string, number> };
  const pid = state.pids[process];
  if (pid === undefined) {
    throw new Error(`there is no ${process}`);
  }
  return pid;
}
