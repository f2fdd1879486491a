import type { Browser, Page } from "playwright-core";
import { afterAll, beforeAll, expect, test } from "vitest";
import { api, checkAccessibility, launch, newPage, open, pidOf, screenshot, takesScreenshots, URL } from "./browser";
import { testOperations } from "./operations";
import { HOSTILE, testPages } from "./pages";

let browser: Browser;
let page: Page;

beforeAll(async () => {
  browser = await launch();
  page = await newPage(browser);
});

afterAll(() => browser.close());

async function submitted(name: string, parameters: unknown): Promise<string> {
  const { id } = (await api("POST", `/v1/functions/${name}/submit`, parameters)) as { id: string };
  return id;
}

test("the overview shows what is wrong and why", async () => {
  await submitted("huge", {});
  await open(page, "");
  await page.locator(".findings", { hasText: "huge" }).getByText("no_capacity").waitFor();
  await page.getByText("live", { exact: true }).waitFor();
  await checkAccessibility(page);
});

test("functions are searched and sorted by the gateway", async () => {
  await page.getByRole("link", { name: "Functions", exact: true }).click();
  await page.getByRole("link", { name: "greet" }).waitFor();
  await checkAccessibility(page);
  await page.keyboard.press("/");
  await page.keyboard.type("hug");
  await page.getByText("1 of").waitFor();
  expect(await page.getByRole("row").count()).toBe(2);
  await page.getByRole("button", { name: "Queued" }).click();
  await page.waitForURL(/sort=queued/);
  await page.getByRole("searchbox").fill("nothing like this");
  await page.getByRole("button", { name: "Show all functions" }).click();
  await page.getByRole("link", { name: "greet" }).waitFor();
});

test("a function is invoked from a form of its signature", async () => {
  await open(page, "/functions/greet?tab=invoke");
  await page.getByLabel("name").fill("Ada");
  await page.getByLabel("times").fill("2");
  await checkAccessibility(page);
  await page.getByRole("button", { name: "Invoke" }).click();
  await page.getByText('"hello Ada hello Ada"').waitFor();
  await page.getByLabel("times").fill("-1");
  await page.getByRole("button", { name: "Invoke" }).click();
  await page.getByText("function_raised").waitFor();
  await page.getByText("ValueError: times is negative").waitFor();
});

test("a call is submitted, followed on its timeline, and cancelled", async () => {
  await open(page, "/functions/slow?tab=invoke");
  await page.getByLabel("seconds").fill("600");
  await page.getByRole("button", { name: "Submit to the queue" }).click();
  await page.locator("main a[href*='/calls/']").click();
  await page.getByText("step 3", { exact: true }).waitFor();
  await page.locator(".timeline .part.ok").waitFor();
  await checkAccessibility(page);
  await page.getByRole("button", { name: "Cancel the call" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Cancel the call" }).click();
  await page.getByText("cancelled", { exact: true }).first().waitFor();
});

test("a failed call shows its attempts, and is replayed", async () => {
  const id = await submitted("greet", { name: "x", times: -1 });
  await open(page, `/calls/${id}`);
  await page.getByText("failed", { exact: true }).first().waitFor();
  expect(await page.locator(".timeline .track").count()).toBeGreaterThanOrEqual(2);
  await page.getByText("6 lines").or(page.getByText("4 lines")).waitFor();
  await checkAccessibility(page);
  await screenshot(page, "call");
  await page.getByRole("button", { name: "Replay" }).click();
  await page.getByRole("dialog").getByRole("button", { name: "Replay" }).click();
  await page.waitForURL((url) => !url.pathname.endsWith(id));
  await page.getByText("of greet").waitFor();
});

test("calls are searched by function, state and id", async () => {
  await open(page, "/calls?function=greet&state=failed");
  const first = page.locator("tbody a[href*='/calls/']").first();
  const id = (await first.textContent()) ?? "";
  await checkAccessibility(page);
  await page.getByRole("searchbox").fill(id);
  await page.keyboard.press("Enter");
  await page.getByRole("heading", { name: id }).waitFor();
});

test("new calls wait until the user wants them, and no call moves away", async () => {
  await open(page, "/calls?function=greet");
  const rows = page.locator("tbody a[href*='/calls/']");
  await rows.first().waitFor();
  const before = await rows.allTextContents();
  const id = await submitted("greet", { name: "new" });
  await page.getByRole("button", { name: "Show 1 new call" }).waitFor();
  expect(await rows.allTextContents()).toEqual(before);
  await checkAccessibility(page);
  await screenshot(page, "calls");
  await page.getByRole("button", { name: "Show 1 new call" }).click();
  await page.getByText("No call is newer.").waitFor();
  expect(await rows.allTextContents()).toEqual([id, ...before]);
});

test("a call that leaves the filter stays in the list, with its new state", async () => {
  const id = await submitted("slow", { seconds: 4 });
  await open(page, "/calls?function=slow&state=running");
  const row = page.getByRole("row", { name: id });
  await row.getByText("running", { exact: true }).waitFor();
  await row.getByText("succeeded", { exact: true }).waitFor();
});

test("a function is scaled and rolled back", async () => {
  await open(page, "/functions/greet?tab=revisions");
  await page.getByRole("cell", { name: "scaling.max_workers" }).waitFor();
  await checkAccessibility(page);
  await page.getByRole("button", { name: "Roll back" }).click();
  await checkAccessibility(page);
  await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
  await page.getByText("revision 1", { exact: true }).first().waitFor();
  await page.getByRole("button", { name: "Scale" }).click();
  await page.getByLabel("Least workers").fill("2");
  await page.getByRole("dialog").getByRole("button", { name: "Scale" }).click();
  await page.getByRole("link", { name: "Status" }).click();
  await page.getByText("2 ready").first().waitFor();
  await checkAccessibility(page);
  await screenshot(page, "function");
});

test("text of users is text: markup, turns of the direction and escape sequences do nothing", async () => {
  await api("POST", "/v1/functions/greet/submit", { name: HOSTILE, times: -1 });
  await open(page, "/functions/greet?tab=logs");
  await page.getByText("onerror").first().waitFor();
  await page.getByText("\\u202e").first().waitFor();
  await checkAccessibility(page);
  expect(await page.locator(".log").innerText()).not.toContain("[31m");
  await page.getByRole("searchbox").fill("no line has this");
  await page.getByText("0 of").waitFor();
  await open(page, "/functions/greet?tab=errors");
  await page.locator("details").first().waitFor();
  await checkAccessibility(page);
  expect(await page.title()).not.toBe("taken");
  expect(await page.locator("main img, main script").count()).toBe(0);
  await open(page, `/functions/${encodeURIComponent(HOSTILE.replaceAll("/", ""))}`);
  await page.getByText("function_not_found").waitFor();
  await open(page, `/functions/${encodeURIComponent(HOSTILE)}`);
  await page.getByRole("alert").waitFor();
  expect(await page.title()).not.toBe("taken");
});

testPages(() => page);
testOperations(() => page);

test("a page of a web function cannot use the console", async () => {
  await open(page, "");
  const stranger = await newPage(browser);
  await stranger.goto(`${URL}/web/default/default/site/`);
  const found = await stranger.evaluate(async () => {
    const statusOf = async (path: string): Promise<number> => (await fetch(path)).status;
    const titleIn = async (path: string): Promise<string> => {
      const opened = window.open(path);
      await new Promise((resolve) => setTimeout(resolve, 500));
      try {
        return opened?.document.title ?? "no window";
      } catch {
        return "refused";
      }
    };
    return {
      api: await statusOf("/console/api/v1/functions"),
      direct: await statusOf("/v1/functions"),
      document: await (await fetch("/console")).text(),
      ownTitle: await titleIn(location.pathname),
      title: await titleIn("/console"),
    };
  });
  expect([found.api, found.direct]).toEqual([401, 403]);
  expect(found.document).toContain('content=""');
  expect(found.ownTitle, "it may read its own pages").toBe("site");
  expect(found.title, "a window of the console is closed to it").not.toContain("gpufn");
  await stranger.context().close();
  await page.getByRole("heading", { name: "History" }).waitFor();
  if (takesScreenshots) {
    await page.locator(".chart canvas").first().waitFor({ timeout: 60_000 }); // the history has a point after 40 s
  }
  await screenshot(page, "overview");
}, 90_000);

test("pages fit a phone, a wall screen and the dark", async () => {
  const phone = await newPage(browser, { width: 360, height: 740, colorScheme: "dark" });
  for (const path of ["", "/functions", "/functions/greet", "/calls", "/nodes"]) {
    await open(phone, path);
    await phone.locator("table:visible").first().waitFor(); // some are folded
    await checkAccessibility(phone);
    if (path === "/functions/greet") {
      await screenshot(phone, "phone");
    }
  }
  await phone.context().close();
  const wall = await newPage(browser, { width: 2560, height: 1440, colorScheme: "dark" });
  await open(wall, "?kiosk");
  await wall.locator("table").first().waitFor();
  expect(await wall.locator("nav").count()).toBe(0);
  await checkAccessibility(wall);
  await wall.context().close();
});

test("a page reconnects by itself after the gateway has restarted", async () => {
  await open(page, "/functions");
  await page.getByText("live", { exact: true }).waitFor();
  process.kill(pidOf("gateway"), "SIGKILL");
  await page.getByText("reconnecting", { exact: true }).waitFor();
  await page.getByText("live", { exact: true }).waitFor();
  await page.getByRole("link", { name: "greet" }).waitFor();
});

test("a key signs in, has only its rights, and its end ends the session", async () => {
  const admin = (await api("POST", "/v1/keys", { scopes: ["admin"] })) as { key: string };
  const reader = (await api("POST", "/v1/keys", { scopes: ["read"], label: "wall" }, admin.key)) as { id: string; key: string };
  await open(page, "/functions/greet");
  await page.getByLabel("API key or token").fill("gpufn_wrong_key");
  await checkAccessibility(page);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByText("unauthorized").waitFor();
  await page.getByLabel("API key or token").fill(reader.key);
  await page.getByRole("button", { name: "Sign in", exact: true }).click();
  await page.getByRole("heading", { name: "greet" }).waitFor();
  await page.getByText("wall", { exact: true }).waitFor();
  expect(await page.getByRole("button", { name: "Scale" }).count()).toBe(0);
  expect(await page.getByRole("link", { name: "Invoke" }).count()).toBe(0);
  await page.reload();
  await page.getByRole("heading", { name: "greet" }).waitFor();
  await api("DELETE", `/v1/keys/${reader.id}`, undefined, admin.key);
  await page.getByLabel("API key or token").waitFor();

  const { ticket } = (await api("POST", "/v1/console/ticket", {}, admin.key)) as { ticket: string };
  await open(page, `/functions#ticket=${ticket}`);
  await page.getByRole("link", { name: "greet" }).waitFor();
  expect(page.url()).not.toContain("ticket");
  await page.getByRole("button", { name: "Sign out" }).click();
  await page.getByLabel("API key or token").waitFor();
});
