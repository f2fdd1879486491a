/** The outcomes of a map: those that exist, then new ones as items end. */

import { useEffect, useState } from "preact/hooks";
import { NO_OUTCOMES, withLines, type Outcomes } from "../core/data/outcomes";
import { send } from "./request";

const MOST_CHARACTERS = 16 << 20; // the lines contain the results
const SHOW_EVERY_MS = 250;

export interface OutcomesState {
  readonly outcomes: Outcomes;
  /** Not all were read, because the results are large. */
  readonly isCut: boolean;
  readonly problem: unknown;
}

/** Read the outcomes of a map. "" reads nothing. */
export function useOutcomes(id: string): OutcomesState {
  const [state, setState] = useState<OutcomesState>({ outcomes: NO_OUTCOMES, isCut: false, problem: null });
  useEffect(() => {
    if (!id) {
      return undefined;
    }
    const abort = new AbortController();
    read(id, abort, setState).catch((problem: unknown) => {
      if (!abort.signal.aborted) {
        setState((before) => ({ ...before, problem }));
      }
    });
    return () => abort.abort();
  }, [id]);
  return state;
}

async function read(id: string, abort: AbortController, show: (state: OutcomesState) => void): Promise<void> {
  const response = await send(`/v1/maps/${id}/outcomes`, { signal: abort.signal, headers: { accept: "application/x-ndjson" } });
  const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
  let outcomes = NO_OUTCOMES;
  let rest = "";
  let length = 0;
  let shownAt = 0;
  for (;;) {
    const part = await reader?.read();
    const isEnd = part === undefined || part.done;
    const lines = (rest + (isEnd ? "" : part.value)).split("\n");
    rest = lines.pop() ?? "";
    outcomes = withLines(outcomes, lines);
    length += isEnd ? 0 : part.value.length;
    const isCut = length > MOST_CHARACTERS;
    if (isEnd || isCut || performance.now() - shownAt > SHOW_EVERY_MS) {
      shownAt = performance.now();
      show({ outcomes, isCut, problem: null });
    }
    if (isEnd) {
      return;
    }
    if (isCut) {
      abort.abort();
      return;
    }
  }
}
