/** A live page: a snapshot, then changes, over one response that the gateway keeps open. It reconnects by itself. */

import { useEffect, useState } from "preact/hooks";
import { applied, type Change, type Json } from "../core/delta";
import { parsedEvents } from "../core/events";
import { Problem, send } from "./request";

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 5_000;
const SILENT_MS = 45_000; // the gateway sends an event at least every 15 s
const HIDDEN_MS = 60_000; // a page that nobody sees costs the gateway nothing

export type Connection = "connecting" | "live" | "reconnecting";

export interface Live<T> {
  readonly data: T | null;
  readonly connection: Connection;
  /** An error that trying again does not end, such as a missing right. */
  readonly problem: Problem | null;
}

/** Show the page at `path` of the API. It changes with its path. */
export function useLive<T>(path: string): Live<T> {
  const [state, setState] = useState<Live<T> & { path: string }>({ ...EMPTY, path });
  useEffect(() => {
    const stream = new LiveStream((next) => setState({ ...(next as Live<T>), path }));
    stream.open(path);
    return () => stream.close();
  }, [path]);
  return state;
}

const EMPTY = { data: null, connection: "connecting", problem: null } as const;

class LiveStream {
  private readonly show: (state: Live<Json>) => void;
  private abort = new AbortController();
  private data: Json = null;
  private timer = 0;
  private isClosed = false;

  constructor(show: (state: Live<Json>) => void) {
    this.show = show;
  }

  open(path: string): void {
    document.addEventListener("visibilitychange", this.onVisibility);
    void this.run(path);
  }

  close(): void {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.onVisibility);
    clearTimeout(this.timer);
    this.abort.abort();
  }

  private async run(path: string): Promise<void> {
    let retryMs = FIRST_RETRY_MS;
    while (!this.isClosed) {
      this.abort = new AbortController();
      try {
        await this.read(path, () => (retryMs = FIRST_RETRY_MS));
      } catch (error) {
        if (error instanceof Problem && isFinal(error)) {
          this.show({ data: this.data, connection: "reconnecting", problem: error });
          return;
        }
      }
      if (this.isClosed) {
        return;
      }
      this.show({ data: this.data, connection: this.data === null ? "connecting" : "reconnecting", problem: null });
      await visible();
      await pause(retryMs);
      retryMs = Math.min(2 * retryMs, LONGEST_RETRY_MS);
    }
  }

  private async read(path: string, onEvent: () => void): Promise<void> {
    const url = `${path}${path.includes("?") ? "&" : "?"}follow=true`;
    const response = await send(url, { signal: this.abort.signal });
    const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      this.watchSilence();
      const part = await reader?.read();
      if (part === undefined || part.done) {
        return;
      }
      const { events, rest } = parsedEvents(text + part.value);
      text = rest;
      for (const event of events) {
        onEvent();
        this.take(event.name, JSON.parse(event.data) as Json);
      }
    }
  }

  private take(name: string, value: Json): void {
    if (name === "error") {
      const fields = value as Record<string, Json>;
      throw new Problem(Number(fields["status"]), String(fields["code"]), String(fields["detail"]));
    }
    const before = this.data;
    this.data = name === "snapshot" ? value : applied(this.data, value as unknown as Change[]);
    if (this.data !== before || name === "snapshot") {
      this.show({ data: this.data, connection: "live", problem: null });
    }
  }

  private watchSilence(): void {
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => this.abort.abort(), SILENT_MS);
  }

  private readonly onVisibility = (): void => {
    clearTimeout(this.timer);
    if (document.hidden) {
      this.timer = window.setTimeout(() => this.abort.abort(), HIDDEN_MS);
    } else {
      this.watchSilence();
    }
  };
}

function isFinal(problem: Problem): boolean {
  return problem.status >= 400 && problem.status < 500 && problem.status !== 408 && problem.status !== 429;
}

function pause(ms: number): Promise<void> {
  return new Promise((resolve) => setTimeout(resolve, ms));
}

function visible(): Promise<void> {
  if (!document.hidden) {
    return Promise.resolve();
  }
  return new Promise((resolve) => document.addEventListener("visibilitychange", () => resolve(), { once: true }));
}
