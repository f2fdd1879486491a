/** Log lines: the last ones, then new ones as they are written. */

import { useEffect, useState } from "preact/hooks";
import type { LogLine } from "../core/errors";
import { Problem, send } from "./request";

const KEPT = 3_000;
const SHOW_EVERY_MS = 250;
const RETRY_MS = 2_000;

export interface Lines {
  readonly lines: readonly LogLine[];
  readonly isLive: boolean;
  readonly problem: unknown;
}

/** Read the log at `path`, and follow it. */
export function useLines(path: string): Lines {
  const [state, setState] = useState<Lines>({ lines: [], isLive: false, problem: null });
  useEffect(() => {
    const abort = new AbortController();
    void follow(path, abort.signal, setState);
    return () => abort.abort();
  }, [path]);
  return state;
}

async function follow(path: string, signal: AbortSignal, show: (state: Lines) => void): Promise<void> {
  while (!signal.aborted) {
    const buffer = new LineBuffer(show);
    try {
      await read(path, signal, buffer);
    } catch (problem) {
      if (problem instanceof Problem && problem.status >= 400 && problem.status < 500) {
        show({ lines: buffer.lines, isLive: false, problem });
        return;
      }
    } finally {
      buffer.close();
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(path: string, signal: AbortSignal, buffer: LineBuffer): Promise<void> {
  const response = await send(path, { signal });
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  buffer.start();
  for (;;) {
    const part = await reader?.read();
    if (part === undefined || part.done) {
      return;
    }
    const texts = (rest + part.value).split("\n");
    rest = texts.pop() ?? "";
    buffer.add(texts.filter((text) => text).map((text) => JSON.parse(text) as LogLine));
  }
}

/** Collects lines, and shows them a few times a second: a worker may write thousands. */
class LineBuffer {
  lines: LogLine[] = [];
  private next = 0;
  private timer = 0;
  private readonly show: (state: Lines) => void;

  constructor(show: (state: Lines) => void) {
    this.show = show;
  }

  start(): void {
    this.schedule();
  }

  add(lines: readonly LogLine[]): void {
    this.lines.push(...lines.map((line) => ({ ...line, number: this.next++ })));
    this.schedule();
  }

  close(): void {
    clearTimeout(this.timer);
  }

  private schedule(): void {
    if (this.timer === 0) {
      this.timer = window.setTimeout(() => {
        this.timer = 0;
        this.lines = this.lines.slice(-KEPT);
        this.show({ lines: [...this.lines], isLive: true, problem: null });
      }, SHOW_EVERY_MS);
    }
  }
}
