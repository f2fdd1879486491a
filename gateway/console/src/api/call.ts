/** One submitted call: its state now, and each change until its end. */

import { useEffect, useState } from "preact/hooks";
import { parsedEvents } from "../core/events";
import { get, Problem, send } from "./request";
import type { Call } from "./views";

const RETRY_MS = 2_000;

export interface CallState {
  readonly call: Call | null;
  readonly problem: unknown;
}

export function useCall(id: string, version: number): CallState {
  const [state, setState] = useState<CallState>({ call: null, problem: null });
  useEffect(() => {
    const abort = new AbortController();
    void follow(id, abort.signal, setState);
    return () => abort.abort();
  }, [id, version]);
  return state;
}

async function follow(id: string, signal: AbortSignal, show: (state: CallState) => void): Promise<void> {
  while (!signal.aborted) {
    try {
      const call = await get<Call>(`/v1/invocations/${id}`, signal);
      show({ call, problem: null });
      if (call.ended_at !== null) {
        return;
      }
      await read(id, signal, show);
    } catch (problem) {
      if (signal.aborted) {
        return;
      }
      if (problem instanceof Problem && problem.status >= 400 && problem.status < 500) {
        show({ call: null, problem });
        return;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

async function read(id: string, signal: AbortSignal, show: (state: CallState) => void): Promise<void> {
  const response = await send(`/v1/invocations/${id}/events`, { signal });
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const part = await reader?.read();
    if (part === undefined || part.done) {
      return;
    }
    const { events, rest } = parsedEvents(text + part.value);
    text = rest;
    for (const event of events.filter((each) => each.name === "state")) {
      show({ call: JSON.parse(event.data) as Call, problem: null });
    }
  }
}
