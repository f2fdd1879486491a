/** Requests to the API, with the session of the console. */

import type { Json } from "../core/delta";

const API = "/console/api";
/** The session has ended: the key was deleted, or 12 hours are over. */
export const SIGNED_OUT = "gpufn-signed-out";
const RELOADED = "gpufn-reloaded-at";
const RELOAD_EVERY_MS = 10_000;

export const pageToken = document.querySelector<HTMLMetaElement>('meta[name="gpufn-page-token"]')?.content ?? "";

/** An error of the API (RFC 9457), or of the way to it. */
export class Problem extends Error {
  readonly status: number;
  readonly code: string;
  readonly fields: Readonly<Record<string, unknown>>;

  constructor(status: number, code: string, message: string, fields: Readonly<Record<string, unknown>> = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.fields = fields;
  }
}

export interface Options {
  readonly method?: "GET" | "POST" | "PUT" | "DELETE";
  readonly json?: unknown;
  readonly headers?: Readonly<Record<string, string>>;
  readonly signal?: AbortSignal;
}

/** Send a request to the API. Throws Problem, or AbortError. */
export async function send(path: string, options: Options = {}): Promise<Response> {
  return sendTo(API + path, options);
}

export async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  const response = await send(path, signal ? { signal } : {});
  return (await response.json()) as T;
}

export async function post<T = Json>(path: string, json: unknown = {}): Promise<T> {
  const response = await send(path, { method: "POST", json });
  return (await response.json()) as T;
}

export async function signIn(credential: { key: string } | { ticket: string }): Promise<void> {
  await sendTo("/console/session", { method: "POST", json: credential });
}

/** Go to the login of the identity provider, which comes back to this page. */
export async function goToLogin(): Promise<void> {
  const response = await sendTo("/console/login", { method: "POST", json: { next: location.pathname + location.search } });
  const { url } = (await response.json()) as { url: string };
  location.assign(url);
}

export async function signOut(): Promise<void> {
  await sendTo("/console/session", { method: "DELETE" });
  location.assign("/console");
}

async function sendTo(url: string, options: Options): Promise<Response> {
  const headers: Record<string, string> = { "x-gpufn-page": pageToken, ...options.headers };
  const init: RequestInit = { method: options.method ?? "GET", headers };
  if (options.json !== undefined) {
    headers["content-type"] = "application/json";
    init.body = JSON.stringify(options.json);
  }
  if (options.signal) {
    init.signal = options.signal;
  }
  let response: Response;
  try {
    response = await fetch(url, init);
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") {
      throw error;
    }
    throw new Problem(0, "no_connection", "The gateway does not respond. Is it running, and is the network up?");
  }
  if (!response.ok) {
    throw await problemOf(response);
  }
  return response;
}

async function problemOf(response: Response): Promise<Problem> {
  let fields: Record<string, unknown> = {};
  try {
    fields = (await response.json()) as Record<string, unknown>;
  } catch {
    // A proxy has answered: it sends no problem details.
  }
  const code = typeof fields["code"] === "string" ? fields["code"] : `http_${response.status}`;
  const detail = typeof fields["detail"] === "string" ? fields["detail"] : `The gateway answered with HTTP ${response.status}.`;
  if (response.status === 401) {
    if (code === "unauthorized") {
      dispatchEvent(new Event(SIGNED_OUT));
    } else {
      reloadOnce();
    }
  }
  return new Problem(response.status, code, detail, fields);
}

/** Load the document again: its page token is no longer valid. */
function reloadOnce(): void {
  const before = Number(sessionStorage.getItem(RELOADED) ?? 0);
  if (Date.now() - before > RELOAD_EVERY_MS) {
    sessionStorage.setItem(RELOADED, String(Date.now()));
    location.reload();
  }
}
