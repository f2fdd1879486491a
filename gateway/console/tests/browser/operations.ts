/** Tests of changes that operators make: splits, drains, trusted keys; and of the login at a provider. */

import { generateKeyPairSync } from "node:crypto";
import type { Page } from "playwright-core";
import { expect, test } from "vitest";
import { api, checkAccessibility, newPage, open, URL } from "./browser";
import { browserOf, change, check } from "./pages";

export function testOperations(shared: () => Page): void {
  test("the calls of a function are split, copied and promoted", async () => {
    const page = shared();
    await api("POST", "/v1/functions/greet/rollback", { revision: 1 });
    await api("POST", "/v1/functions/greet/scale", { min_workers: 0, max_workers: 4 });
    await open(page, "/functions/greet?tab=traffic");
    await page.getByText("Revision 1 gets all calls.").waitFor();
    await page.getByRole("button", { name: "Split the calls" }).click();
    await page.locator('input[name="weight-1"]').fill("60");
    await page.locator('input[name="weight-2"]').fill("30");
    await page.getByText("90 of 100 %").waitFor();
    await page.getByRole("dialog").getByRole("button", { name: "Set" }).click();
    await page.getByText("they must add up to 100 %").waitFor();
    await page.locator('input[name="weight-2"]').fill("40");
    await page.getByRole("dialog").getByText("Copies of calls").click();
    await page.getByLabel("To", { exact: true }).selectOption("2");
    await page.getByLabel("Headers").fill("x-canary=1:2");
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Set" }).click();
    await page.getByText("1=60 %, 2=40 %, copies to 2").waitFor();
    for (let call = 0; call < 10; call++) await api("POST", "/v1/functions/greet/invoke", { name: "Ada" });
    // Calls that revision 2 runs itself have no copy.
    await page.locator(".stat", { hasText: "Equal" }).getByText(/^([1-9]|10)$/).waitFor();
    await check(page);
    await change(page, "Promote revision 2", "Promote");
    await page.getByText("Revision 2 gets all calls.").waitFor();
  }, 60_000); // workers of both revisions start

  test("a node is drained, and accepts workers again", async () => {
    const page = shared();
    await open(page, "/nodes");
    const name = (await page.locator("tbody a").first().textContent()) ?? "";
    await change(page, `Drain ${name}`, "Drain");
    await page.getByText(/^(drained|draining)/).first().waitFor();
    await check(page);
    await open(page, `/nodes/${name}`);
    await change(page, "End the drain", "End the drain");
    await page.getByRole("button", { name: "Drain", exact: true }).waitFor();
  });

  test("a key is trusted and removed, and signatures are required", async () => {
    const page = shared();
    const pem = generateKeyPairSync("ed25519").publicKey.export({ type: "spki", format: "pem" }).toString();
    await open(page, "/signing");
    await page.getByText("No key is trusted").waitFor();
    await page.getByRole("button", { name: "Trust a key" }).click();
    await page.getByLabel("Name", { exact: true }).fill("ci");
    await page.getByLabel("Public key").fill(pem);
    await page.getByLabel("May sign").fill("prod/*");
    await checkAccessibility(page);
    await page.getByRole("dialog").getByRole("button", { name: "Trust" }).click();
    await page.getByRole("cell", { name: "prod/*" }).waitFor();
    await page.getByRole("button", { name: "Require in an environment" }).click();
    await page.getByLabel("Environment").fill("prod");
    await page.getByRole("dialog").getByRole("button", { name: "Require" }).click();
    await page.getByText("accepts signed deploys only").waitFor();
    await check(page);
    await change(page, "Allow unsigned prod", "Allow unsigned");
    await change(page, "Remove ci", "Remove");
    await page.getByText("No key is trusted").waitFor();
  });

  test("a user logs in at the provider, and comes back to the page", async () => {
    const { id, key } = (await api("POST", "/v1/keys", { scopes: ["admin"] })) as { id: string; key: string };
    const visitor = await newPage(browserOf(shared()));
    await visitor.goto(`${URL}/console/functions?search=gre`);
    const button = visitor.getByRole("button", { name: /^Sign in with/ });
    await button.waitFor();
    await checkAccessibility(visitor);
    await button.click();
    await visitor.getByText("alice@example.org").waitFor();
    expect(visitor.url()).toBe(`${URL}/console/functions?search=gre`);
    await visitor.getByRole("link", { name: "greet" }).waitFor();
    const cookies = await visitor.context().cookies();
    expect(cookies.map(({ httpOnly, sameSite, path }) => ({ httpOnly, sameSite, path }))).toEqual([{ httpOnly: true, sameSite: "Strict", path: "/console" }]);
    await visitor.context().close();
    await api("DELETE", `/v1/keys/${id}`, undefined, key);
  });
}
