/** Tests of the pages for operators: each page, and each change that it offers. console.test.ts runs them on its platform. */

import { createHash } from "node:crypto";
import type { Browser, Page } from "playwright-core";
import { expect, test } from "vitest";
import { api, checkAccessibility, newPage, open, screenshot, URL } from "./browser";
import { NODES } from "./gpus";
import { ADVICE, COSTS, NIGHTLY, PROFILE, traceOf } from "./stand-ins";

export const HOSTILE = '<script>document.title = "taken"</script><img src=x onerror="document.title=\'taken\'">';

/** Press a button, and confirm in the dialog that asks. */
export async function change(page: Page, button: string, action: string): Promise<void> {
  await page.getByRole("button", { name: button, exact: true }).first().click();
  await page.getByRole("dialog").getByRole("button", { name: action, exact: true }).click();
  await page.getByRole("dialog").waitFor({ state: "detached" });
}

async function fill(page: Page, fields: Readonly<Record<string, string>>): Promise<void> {
  for (const [label, value] of Object.entries(fields)) {
    await page.getByRole("dialog").getByLabel(label, { exact: true }).fill(value);
  }
}

async function raw(method: string, path: string, body: string | Uint8Array<ArrayBuffer>, type: string): Promise<void> {
  const response = await fetch(URL + path, { method, body, headers: { "content-type": type } });
  if (!response.ok) {
    throw new Error(`${method} ${path}: HTTP ${response.status} ${await response.text()}`);
  }
}

export function browserOf(page: Page): Browser {
  const browser = page.context().browser();
  if (browser === null) {
    throw new Error("the page has no browser");
  }
  return browser;
}

async function fits(page: Page): Promise<void> {
  const size = page.viewportSize();
  await page.setViewportSize({ width: 360, height: 740 });
  // Charts get their new width after the next frame.
  await page.waitForFunction(() => document.documentElement.scrollWidth <= document.documentElement.clientWidth);
  await page.setViewportSize(size ?? { width: 1280, height: 800 });
}

export async function check(page: Page): Promise<void> {
  await checkAccessibility(page);
  await fits(page);
  expect(await page.title()).not.toBe("taken");
}

export function testPages(shared: () => Page): void {
  test("nodes show the state of their GPUs, and who holds them", async () => {
    const page = shared();
    await open(page, "/nodes");
    await page.locator(".heat-cell", { hasText: "degraded" }).waitFor();
    await page.getByRole("link", { name: /L4/ }).first().click();
    await page.getByText("a row of its memory is being remapped").first().waitFor();
    await page.getByRole("heading", { name: "History of NVIDIA L4" }).or(page.getByText("No history is kept about it, or none yet.")).first().waitFor();
    await check(page);
    await open(page, "/nodes/gone");
    await page.getByText("This node does not report.").waitFor();
  });

  test("a GPU has its metrics in a heat map, and the shares of its workers", async () => {
    const page = await newPage(browserOf(shared()));
    await page.addInitScript(standIn, JSON.stringify(NODES)); // the GPUs of this machine, if it has any, report other values
    await open(page, "/nodes");
    await page.locator(".heat-cell.heat-9").first().waitFor();
    await check(page);
    await screenshot(page, "nodes");
    await page.getByRole("button", { name: "End the drain gpu-z" }).waitFor();
    await page.getByLabel("Metric").selectOption("temperature");
    await page.getByText("71 °C").waitFor();
    await open(page, `/nodes/gpu-a`);
    await page.getByText("at most 25 % of compute").first().waitFor();
    await page.getByText("MIG instance of").first().waitFor();
    await check(page);
    await screenshot(page, "node");
    await open(page, "/nodes/gpu-z");
    await page.getByRole("button", { name: "End the drain" }).waitFor();
    await checkAccessibility(page);
    await screenshot(page, "node-gone");
    await page.context().close();
  });

  test("a map shows its progress and the items that failed, and is cancelled", async () => {
    const page = shared();
    const id = "01m8ebv0c9ewm1r9pgz32f3x0p";
    const items = [{ name: "a" }, { name: HOSTILE, times: -1 }, { name: "c" }].map((item) => JSON.stringify(item)).join("\n");
    await raw("PUT", `/v1/functions/greet/maps/${id}/items/0?last=true`, items, "application/x-ndjson");
    await open(page, "/maps?function=greet");
    await page.getByText("ended", { exact: true }).waitFor();
    await check(page);
    await page.getByRole("link", { name: id }).click();
    await page.getByText("ValueError: times is negative").waitFor();
    await page.getByRole("heading", { name: "Critical path" }).waitFor();
    expect(await page.locator(".stat", { hasText: "succeeded" }).locator("dd").textContent()).toBe("2");
    await check(page);
    const other = "01m8ebv0c9ewm1r9pgz32f3x0q";
    await raw("PUT", `/v1/functions/slow/maps/${other}/items/0`, '{"seconds": 600}', "application/x-ndjson");
    await open(page, `/maps/${other}`);
    await change(page, "Cancel the map", "Cancel the map");
    await page.getByText("cancelled", { exact: true }).first().waitFor();
  });

  test("new maps wait until the user wants them, and no map moves away", async () => {
    const page = shared();
    const put = (id: string): Promise<unknown> => raw("PUT", `/v1/functions/greet/maps/${id}/items/0?last=true`, '{"name": "a"}', "application/x-ndjson");
    await put("01m8ebv0c9ewm1r9pgz32f3x0r");
    await open(page, "/maps?function=greet");
    await page.getByRole("link", { name: "01m8ebv0c9ewm1r9pgz32f3x0r" }).waitFor();
    const rows = page.locator("tbody a[href*='/maps/']");
    const before = await rows.allTextContents();
    await put("01m8ebv0c9ewm1r9pgz32f3x0s");
    await page.getByRole("button", { name: "Show 1 new map" }).waitFor();
    expect(await rows.allTextContents()).toEqual(before);
    await checkAccessibility(page);
    await page.getByRole("button", { name: "Show 1 new map" }).click();
    await page.getByText("No map is newer.").waitFor();
    expect(await rows.allTextContents()).toEqual(["01m8ebv0c9ewm1r9pgz32f3x0s", ...before]);
  });

  test("dead letters are replayed and deleted, alone and all of a function", async () => {
    const page = shared();
    for (const name of [HOSTILE, "b", "c"]) {
      await api("POST", "/v1/functions/greet/submit", { name, times: -1 });
    }
    await open(page, "/dead-letters");
    await page.getByText("onerror").first().waitFor();
    await check(page);
    await page.getByRole("button", { name: /^only its letters/ }).first().click();
    await page.getByRole("button", { name: "Replay all" }).waitFor();
    await page.getByRole("button", { name: /^Replay 0/ }).first().click();
    await page.getByRole("dialog").getByRole("button", { name: "Replay", exact: true }).click();
    await page.waitForURL(/\/calls\//);
    await open(page, "/dead-letters?function=greet");
    const ids = async (): Promise<string[]> => ((await api("GET", "/v1/dlq/greet")) as { letters: { id: string }[] }).letters.map(({ id }) => id);
    await page.getByRole("button", { name: /^Delete 0/ }).last().click();
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Delete", exact: true }).click();
    await page.getByRole("dialog").waitFor({ state: "detached" });
    const before = await ids();
    await change(page, "Replay all", "Replay all");
    await expect.poll(async () => (await ids()).filter((id) => before.includes(id)), { timeout: 20_000 }).toEqual([]);
    await page.getByRole("button", { name: "Delete all" }).waitFor(); // the new calls fail again
    await change(page, "Delete all", "Delete all");
    expect((await ids()).length).toBeLessThan(3);
  });

  test("a schedule is added, run, paused, resumed and removed", async () => {
    const page = shared();
    await open(page, "/schedules");
    await page.getByText("declared", { exact: true }).waitFor();
    await page.getByRole("button", { name: "Add a schedule" }).press("Enter");
    await page.getByRole("dialog").waitFor();
    await page.keyboard.press("Escape");
    await page.waitForFunction(() => document.activeElement?.textContent === "Add a schedule"); // the focus is where it was
    await page.keyboard.press("Enter");
    await fill(page, { Function: "greet", "Cron line": "0 6 * * MON-FRI", "Time zone": "Europe/Berlin", Arguments: "{" });
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Add" }).click();
    await page.getByText("The arguments are not valid JSON").waitFor();
    await fill(page, { Arguments: '{"name": "six o\'clock"}' });
    await page.getByRole("dialog").getByRole("button", { name: "Add" }).click();
    const id = (await page.getByRole("cell", { name: /^greet\./ }).textContent())?.trim() ?? "";
    await check(page);
    await change(page, `Run now ${id}`, "Run now");
    await page.waitForURL(/\/calls\//);
    await open(page, "/schedules?function=greet");
    await change(page, `Pause ${id}`, "Pause");
    await page.getByText("paused", { exact: true }).waitFor();
    await change(page, `Resume ${id}`, "Resume");
    await page.getByRole("button", { name: `Pause ${id}` }).waitFor();
    await change(page, `Remove ${id}`, "Remove");
    await page.getByText("No schedule is here.").waitFor();
    await open(page, "/schedules");
    expect(await page.getByRole("button", { name: /^Remove/ }).count(), "a declared schedule stays").toBe(0);
    await page.getByRole("button", { name: "Add a schedule" }).click();
    await page.getByRole("radio", { name: "once" }).check();
    await fill(page, { Function: "greet", Delay: "2h", Arguments: '{"name": "once"}' });
    await page.getByRole("dialog").getByRole("button", { name: "Add" }).click();
    await page.getByText("once", { exact: true }).waitFor();
  });

  test("a build shows its stages, candidates and errors; one that waits is cancelled", async () => {
    const page = shared();
    await open(page, "/builds");
    await page.getByText("succeeded", { exact: true }).waitFor();
    await check(page);
    await page.getByRole("row", { name: /succeeded/ }).getByRole("link").first().click();
    await page.getByText("onnxruntime-cpu").first().waitFor();
    await page.locator(".plot .curve").waitFor();
    expect(await page.locator(".stages .done").count()).toBe(8);
    await check(page);
    await page.setViewportSize({ width: 1280, height: 1020 });
    await screenshot(page, "build");
    await page.setViewportSize({ width: 1280, height: 800 });
    const [downloaded] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download the report" }).click()]);
    expect(downloaded.suggestedFilename()).toMatch(/\.html$/);
    await open(page, "/builds");
    await page.getByRole("row", { name: /pending/ }).getByRole("link").first().click();
    await change(page, "Cancel the build", "Cancel the build");
    await page.getByText("cancelled", { exact: true }).first().waitFor();
  });

  test("events are a time line, filtered by subject and kind", async () => {
    const page = shared();
    await open(page, "/events");
    await page.locator(".events li.info").first().waitFor();
    await check(page);
    await page.getByLabel("Kind").selectOption("quarantine");
    await page.getByText("is degraded").first().waitFor();
    expect(await page.locator(".events .info").count()).toBe(0);
    await page.getByLabel("Kind").selectOption("");
    await page.getByRole("searchbox").fill("greet");
    await page.keyboard.press("Enter");
    await page.waitForURL(/subject=greet/);
    await page.locator(".events li").first().waitFor();
    await screenshot(page, "events");
  });

  test("a secret is set, changed and deleted, and its value is never shown", async () => {
    const page = shared();
    await open(page, "/secrets");
    await page.getByRole("button", { name: "Set a secret" }).click();
    await fill(page, { Name: "DB_URL", Environment: "prod", App: "search", Value: "hunter2" });
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Set" }).click();
    await page.getByRole("cell", { name: "prod/search/*", exact: true }).waitFor();
    await check(page);
    const name = "DB_URL of prod/search/*";
    await page.getByRole("button", { name: `Change ${name}` }).click();
    await fill(page, { Value: "hunter3" });
    await page.getByRole("dialog").getByRole("button", { name: "Set" }).click();
    await page.getByRole("cell", { name: "2", exact: true }).waitFor();
    await change(page, "Rotate the master key", "Rotate");
    expect(await page.content()).not.toContain("hunter");
    await change(page, `Delete ${name}`, "Delete");
    await page.getByText("No secret is here.").waitFor();
  });

  test("a volume shows its versions and files, which are downloaded", async () => {
    const page = shared();
    const content = new TextEncoder().encode(HOSTILE);
    const digest = createHash("sha256").update(content).digest("hex");
    const files = ["readme.html", `models/a/${HOSTILE.replaceAll("/", "")}`].map((path) => ({ path, size: content.length, digest }));
    await raw("PUT", `/v1/volumes/weights/blobs/${digest}`, content, "application/octet-stream");
    await api("POST", "/v1/volumes/weights/commits", { put: files });
    await api("POST", "/v1/volumes/weights/commits", { remove: ["readme.html"] });
    await open(page, "/volumes");
    await page.getByRole("link", { name: "weights" }).click();
    await page.getByRole("button", { name: "models/" }).click();
    await page.getByRole("button", { name: "a/" }).click();
    await page.getByText("onerror").waitFor();
    await check(page);
    await page.getByRole("button", { name: "Files of version 1" }).click();
    const [downloaded] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download readme.html" }).click()]);
    expect(downloaded.suggestedFilename()).toBe("readme.html");
    await change(page, "Delete the volume", "Delete the volume");
    await page.getByText("There is no volume.").waitFor();
    await check(page);
  });

  test("queues and dicts are listed and deleted", async () => {
    const page = shared();
    await raw("POST", "/v1/queues/jobs/items", "1", "application/json");
    await raw("PUT", `/v1/dicts/cache/entry?key=${encodeURIComponent(HOSTILE)}`, "1", "application/json");
    await open(page, "/queues");
    await page.getByRole("button", { name: "Keys of cache" }).click();
    await page.getByText("onerror").waitFor();
    await check(page);
    await change(page, "Delete jobs", "Delete");
    await page.getByText("There is no queue.").waitFor();
    await change(page, "Delete cache", "Delete");
    await page.getByText("There is no dict.").waitFor();
  });

  test("a team is created, changed and removed", async () => {
    const page = shared();
    await open(page, "/teams");
    await page.getByRole("button", { name: "Create a team" }).click();
    await fill(page, { Name: "ads", Owns: "prod/ads/*", Weight: "2" });
    await page.getByRole("dialog").getByText("Limits", { exact: true }).click();
    await fill(page, { "Workers at the same time": "10" });
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Create" }).click();
    await page.getByText("0 of 10").waitFor();
    await page.getByRole("button", { name: "Edit ads" }).click();
    await fill(page, { Owns: "prod/ads/*\nprod/bids/*" });
    await page.getByRole("dialog").getByRole("button", { name: "Set" }).click();
    await page.getByText("prod/ads/*, prod/bids/*").waitFor();
    await page.getByText("weight 2").waitFor();
    await check(page);
    await change(page, "Remove ads", "Remove");
    await page.getByText("There is no team").waitFor();
  });

  test("usage is summed by function, key and day", async () => {
    const page = shared();
    await open(page, "/usage");
    await page.getByRole("heading", { name: "Usage by function" }).waitFor();
    await page.getByRole("combobox", { name: "Time" }).selectOption("30");
    await page.waitForURL(/days=30/);
    await page.getByLabel("Order").selectOption("key");
    await page.getByRole("heading", { name: "Usage by API key" }).waitFor();
    await check(page);
  });

  test("costs are shown by function and day, with their times if there are no prices, and downloaded", async () => {
    const page = shared();
    await open(page, "/costs");
    await page.getByText("There are no prices").waitFor();
    await page.getByRole("cell", { name: "greet", exact: true }).waitFor();
    await check(page);
    const [downloaded] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: /^Download CSV/ }).click()]);
    expect(downloaded.suggestedFilename()).toMatch(/^costs-.*\.csv$/);
    const priced = await newPage(browserOf(page));
    await priced.addInitScript(answers, JSON.stringify({ "/v1/costs": COSTS }));
    await open(priced, "/costs?group=day");
    await priced.getByText("budget").first().waitFor();
    await check(priced);
    await screenshot(priced, "costs");
    await priced.context().close();
  });

  test("advice that needs no deploy is followed by a click, and a profile is a flame graph", async () => {
    const page = await newPage(browserOf(shared()));
    await page.addInitScript(answers, JSON.stringify({ "/nightly/advice": ADVICE, "/nightly/profile": PROFILE, "/functions/nightly?": NIGHTLY }));
    await open(page, "/functions/nightly?tab=advice");
    await page.getByText("in the code, then deploy").waitFor();
    await check(page);
    await page.getByRole("button", { name: "Apply min_workers 1" }).click();
    await page.getByRole("dialog").getByRole("button", { name: "Apply" }).click();
    await page.getByRole("dialog").waitFor({ state: "detached" });
    expect(((await api("GET", "/v1/functions/nightly")) as { min_workers: number }).min_workers).toBe(1);
    await api("POST", "/v1/functions/nightly/scale", { min_workers: null });
    await open(page, "/functions/nightly?tab=profile");
    await page.getByRole("button", { name: "Profile", exact: true }).click();
    await page.getByRole("treeitem").filter({ hasText: "encode" }).click();
    expect(await page.getByRole("treeitem", { selected: true }).textContent()).toBe("encode (app.py)");
    await page.keyboard.press("ArrowUp");
    await page.waitForFunction(() => document.activeElement?.textContent === "predict (app.py)"); // with the next picture
    await check(page);
    await screenshot(page, "profile");
    const [downloaded] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download for speedscope" }).click()]);
    expect(downloaded.suggestedFilename()).toBe("nightly.speedscope.json");
    await page.context().close();
  });

  test("a call shows its nested calls and the critical path through them", async () => {
    const page = await newPage(browserOf(shared()));
    const { id } = (await api("POST", "/v1/functions/greet/submit", { name: "nested" })) as { id: string };
    await page.addInitScript(answers, JSON.stringify({ "/v1/traces/": traceOf(id) }));
    await open(page, `/calls/${id}`);
    await page.getByRole("heading", { name: "Nested calls and the critical path" }).waitFor();
    await page.getByText("run of embed").waitFor();
    expect(await page.locator(".path .part.accent").count()).toBe(5);
    await check(page);
    await page.context().close();
  });

  test("the audit log is searched and verified in the browser", async () => {
    const page = shared();
    await open(page, "/audit");
    await page.getByRole("searchbox").fill("DB_URL delete");
    await page.getByRole("cell", { name: "DELETE /v1/secrets/{name}" }).waitFor();
    expect(await page.locator("tbody tr").count()).toBe(1);
    await page.getByRole("button", { name: "Verify the log" }).click();
    await page.getByText("intact", { exact: true }).waitFor();
    const hash = (await page.locator("code.hash").textContent()) ?? "";
    const { head } = (await api("GET", "/v1/audit?limit=1")) as { head: { hash: string } };
    expect(hash).toBe(head.hash);
    await check(page);
    await page.getByLabel(/Hash that you noted/).fill("0".repeat(64));
    await page.getByRole("button", { name: "Verify the log" }).click();
    await page.getByText("broken", { exact: true }).waitFor();
  });

  test("keys are created, limited, rotated and deleted, and a session shows only what its key may do", async () => {
    const page = shared();
    await open(page, "/users");
    await page.getByText("No user has logged in.").waitFor();
    await check(page);
    // The page token was made with the key of these tokens, so the document is loaded again.
    await Promise.all([page.waitForEvent("load"), change(page, "End all tokens", "End all tokens")]);
    await open(page, "/keys");
    await page.getByRole("button", { name: "Create a key" }).click();
    await fill(page, { Purpose: "first" });
    await page.getByRole("dialog").getByRole("button", { name: "Create" }).click();
    const secret = page.getByRole("textbox", { name: "The key" });
    const admin = (await secret.textContent()) ?? "";
    expect(admin).toMatch(/^gpufn_/);
    await page.getByRole("dialog", { name: /^The key/ }).waitFor();
    await page.keyboard.press("Escape");
    await page.keyboard.press("Escape");
    await checkAccessibility(page);
    await page.getByRole("button", { name: /sign in with it/ }).click();
    await page.getByText("yours", { exact: true }).waitFor();
    await page.getByRole("button", { name: "Create a key" }).click();
    await fill(page, { Purpose: "search-ci", Scopes: "read:greet", "Expires in": "30d" });
    await page.getByRole("dialog").getByRole("button", { name: "Create" }).click();
    const reader = (await secret.textContent()) ?? "";
    await page.getByRole("button", { name: "I have stored it" }).click();
    await page.getByRole("button", { name: "Limits search-ci" }).click();
    await fill(page, { Calls: "50/s", "Calls at once": "100" });
    await page.getByRole("dialog").getByRole("button", { name: "Set the limits" }).click();
    await page.getByText("50/s (burst 100)").waitFor();
    await check(page);
    await screenshot(page, "keys");
    const hostile = (await api("POST", "/v1/keys", { label: HOSTILE, scopes: ["read"] }, admin)) as { id: string };
    await page.reload();
    await page.getByText("onerror").waitFor();
    await fits(page);
    await api("DELETE", `/v1/keys/${hostile.id}`, undefined, admin);
    expect(await page.title()).not.toBe("taken");
    await page.getByRole("button", { name: "Rotate search-ci" }).click();
    await fill(page, { "The old secret stays valid for": "1h" });
    await page.getByRole("dialog").getByRole("button", { name: "Rotate" }).click();
    expect(await secret.textContent()).not.toBe(reader);
    await page.getByRole("button", { name: "I have stored it" }).click();
    await page.getByText("old secret until").waitFor();

    const visitor = await newPage(browserOf(page));
    await visitor.goto(`${URL}/console/dead-letters?function=greet`);
    await visitor.getByLabel("API key or token").fill(reader);
    await visitor.getByRole("button", { name: "Sign in", exact: true }).click();
    await visitor.getByText(/newest first/).waitFor();
    expect(await visitor.getByRole("button", { name: /Replay|Delete/ }).count()).toBe(0);
    const shown = await visitor.getByRole("navigation", { name: "Pages" }).getByRole("link").allTextContents();
    expect(shown).toContain("Schedules");
    expect(shown.filter((label) => ["Nodes", "API keys", "Users", "Audit log"].includes(label))).toEqual([]);
    await visitor.goto(`${URL}/console/keys`);
    await visitor.getByText("forbidden").waitFor();
    expect(await visitor.getByRole("button", { name: "Create a key" }).count()).toBe(0);
    await visitor.context().close();

    await change(page, "Delete search-ci", "Delete");
    await change(page, "Delete first", "Delete");
    await page.getByText("this machine, no keys").waitFor();
  });
}

/** Runs in the page: requests whose address has one of these parts get this JSON, as an event if they follow a live page. */
function answers(json: string): void {
  const original = window.fetch;
  const stubs = JSON.parse(json) as Record<string, unknown>;
  window.fetch = (input, init) => {
    const found = Object.entries(stubs).find(([part]) => String(input).includes(part));
    if (found === undefined) {
      return original(input, init);
    }
    const body = JSON.stringify(found[1]);
    if (!String(input).includes("follow=true")) {
      return Promise.resolve(new Response(body, { headers: { "content-type": "application/json" } }));
    }
    const events = new ReadableStream({ start: (controller) => controller.enqueue(new TextEncoder().encode(`event: snapshot\ndata: ${body}\n\n`)) });
    return Promise.resolve(new Response(events, { headers: { "content-type": "text/event-stream" } }));
  };
}

/** Runs in the page: the live page of nodes shows made-up GPUs. */
function standIn(nodes: string): void {
  const original = window.fetch;
  window.fetch = (input, init) => {
    if (!String(input).includes("/v1/console/nodes")) {
      return original(input, init);
    }
    const body = new ReadableStream({
      start: (controller) => controller.enqueue(new TextEncoder().encode(`event: snapshot\ndata: ${nodes}\n\n`)),
    });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
}
