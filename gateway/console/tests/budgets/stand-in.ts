/** A stand-in for a gateway with 10,000 functions, all of which are called: every row of a page changes each second. */

import { readFileSync } from "node:fs";
import { createServer, type Server, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";

const ASSETS = new URL("../../../gpufn_gateway/console/assets/", import.meta.url);
const FUNCTIONS = 10_000;
const ROWS = 100;
const LINES_PER_S = 200;
const TYPES: Readonly<Record<string, string>> = { js: "text/javascript", css: "text/css", svg: "image/svg+xml" };

export async function start(): Promise<{ server: Server; url: string }> {
  const server = createServer((request, response) => respond(request.url ?? "/", response));
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { server, url: `http://localhost:${(server.address() as AddressInfo).port}/console` };
}

function respond(url: string, response: ServerResponse): void {
  const path = url.split("?")[0] ?? "";
  if (path.startsWith("/console/static/")) {
    const name = path.slice("/console/".length);
    response.writeHead(200, { "content-type": TYPES[name.split(".").at(-1) ?? ""] ?? "text/plain" });
    response.end(readFileSync(new URL(name, ASSETS)));
  } else if (path === "/console/api/v1/auth/me") {
    json(response, { id: "", name: "", scopes: ["admin"], expires_at: null });
  } else if (path === "/console/api/v1/console/overview") {
    stream(response, () => ({ total: { ...sum(FUNCTIONS), apps: 200 }, nodes: null, findings: [], apps: appRows(), busiest: rows(20) }));
  } else if (path === "/console/api/v1/console/functions") {
    stream(response, () => ({ all: FUNCTIONS, matching: FUNCTIONS, offset: 0, order: Object.keys(rows(ROWS)), rows: rows(ROWS) }));
  } else if (path.startsWith("/console/api/v1/console/functions/")) {
    stream(response, () => ({ ...row(), active: 1, updated_at: 1, min_workers: null, max_workers: null, reason: "", terms: {}, service_s: 1, cold_start_s: 1, last_start: null, next: null, findings: [], processes: {} }));
  } else if (path.endsWith("/history")) {
    response.writeHead(404, { "content-type": "application/problem+json" });
    response.end(JSON.stringify({ status: 404, code: "request_error", detail: "There is nothing at this path." }));
  } else if (path.endsWith("/logs")) {
    logs(response);
  } else if (path.startsWith("/console/api/v1/functions/")) {
    json(response, { name: "f", active: 1, serving: 1, latest: 1, deployed_at: 1, source: null, env: [], spec: { methods: [], resources: { gpu: [] }, scaling: { min_workers: 0, max_workers: 4 }, is_class: false } });
  } else {
    response.writeHead(200, { "content-type": "text/html" });
    response.end(readFileSync(new URL("index.html", ASSETS), "utf8").replace("{{page-token}}", "1.token"));
  }
}

function json(response: ServerResponse, value: unknown): void {
  response.writeHead(200, { "content-type": "application/json" });
  response.end(JSON.stringify(value));
}

function stream(response: ServerResponse, page: () => Record<string, unknown>): void {
  response.writeHead(200, { "content-type": "text/event-stream" });
  response.write(`event: snapshot\ndata: ${JSON.stringify(page())}\n\n`);
  const timer = setInterval(() => response.write(`event: delta\ndata: ${JSON.stringify(changes(page()))}\n\n`), 1000);
  response.on("close", () => clearInterval(timer));
}

/** As the gateway writes them: one change for each value. */
function changes(value: Record<string, unknown>, path: string[] = []): [string[], unknown][] {
  return Object.entries(value).flatMap(([key, each]): [string[], unknown][] =>
    typeof each === "object" && each !== null && !Array.isArray(each) ? changes(each as Record<string, unknown>, [...path, key]) : [[[...path, key], each]],
  );
}

function logs(response: ServerResponse): void {
  response.writeHead(200, { "content-type": "application/x-ndjson" });
  const write = (count: number): void => {
    const lines = Array.from({ length: count }, () => JSON.stringify({ at: Date.now() / 1000, function: "f", revision: 1, worker: "w-1", stream: "stdout", text: `line ${Math.random()}`, invocation: "01m8e8ap91jtx72bcy0000004w" }));
    response.write(`${lines.join("\n")}\n`);
  };
  write(1000);
  const timer = setInterval(() => write(LINES_PER_S / 10), 100);
  response.on("close", () => clearInterval(timer));
}

function rates(): Record<string, number> {
  const value = (): number => Math.round(Math.random() * 1000) / 1000;
  return { calls_per_s: value(), errors_per_s: value(), error_share: value(), p50_s: value(), p99_s: value(), run_s: value(), gpus: value() };
}

function sum(functions: number): Record<string, unknown> {
  return { functions, workers: { ready: Math.ceil(Math.random() * 100) }, queued: Math.ceil(Math.random() * 100), running: 3, ...rates() };
}

function row(): Record<string, unknown> {
  return { serving: 1, active: 1, gpu: "L4", models: 0, web: false, wanted: 1, waiting: null, finding: null, ...sum(1) };
}

function rows(count: number): Record<string, unknown> {
  return Object.fromEntries(Array.from({ length: count }, (_, index) => [`prod/app-${index % 200}/function-${index}`, row()]));
}

function appRows(): Record<string, unknown> {
  return Object.fromEntries(Array.from({ length: 50 }, (_, index) => [`prod/app-${index}`, sum(50)]));
}
