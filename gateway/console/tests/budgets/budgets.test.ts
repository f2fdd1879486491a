/** Measures, and asserts nothing: times depend on the machine. Budgets: first paint 1 s, 16 ms of script per update. */

import { chromium } from "playwright-core";
import { test } from "vitest";
import { start } from "./stand-in";

const SECONDS = 10;
const PAGES = { overview: "", functions: "/functions", function: "/functions/f", logs: "/functions/f?tab=logs" };
const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync"];

interface Event {
  readonly name: string;
  /** Microseconds of CPU time of the thread, so that other processes do not count. */
  readonly tdur?: number;
  readonly cat: string;
  readonly tid: number;
}

test("budgets", async () => {
  const { server, url } = await start();
  const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: FLAGS });
  for (const [name, path] of Object.entries(PAGES)) {
    const page = await browser.newPage();
    await page.goto(url + path);
    await page.locator("h1").waitFor();
    const paint = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? Number.NaN);
    const heading = await page.evaluate(() => performance.now());
    await page.waitForTimeout(2000);
    await browser.startTracing(page, { categories: ["devtools.timeline"] });
    await page.waitForTimeout(SECONDS * 1000);
    const trace = JSON.parse((await browser.stopTracing()).toString()) as { traceEvents: Event[] };
    const scripts = trace.traceEvents.filter((event) => event.name === "FunctionCall" || event.name === "RunMicrotasks" || event.name === "FireAnimationFrame");
    const lengths = scripts.map((event) => (event.tdur ?? 0) / 1000).sort((a, b) => a - b);
    const total = lengths.reduce((sum, each) => sum + each, 0);
    const longest = lengths.at(-1) ?? 0;
    const updates = lengths.filter((each) => each > 1);
    const middle = updates[Math.floor(updates.length / 2)] ?? 0;
    process.stdout.write(
      `${name}: first paint ${paint.toFixed(0)} ms, heading by ${heading.toFixed(0)} ms, script ${(total / SECONDS).toFixed(1)} ms per second, median update ${middle.toFixed(1)} ms, longest ${longest.toFixed(1)} ms of CPU\n`,
    );
    await page.close();
  }
  await browser.close();
  server.close();
});
