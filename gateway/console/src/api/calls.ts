/** Submitted calls, page by page: newest first, the first page again every few seconds. */

import { useEffect, useRef, useState } from "preact/hooks";
import { get } from "./request";
import type { Call } from "./views";

const PART = 50;
const LEAST_WAIT_MS = 3_000;
const WAIT_PER_COST = 10; // a search that takes a second runs every ten seconds

export interface Wanted {
  readonly function: string;
  readonly state: string;
  readonly key: string;
  /** The call that made them. */
  readonly parent?: string;
  /** Unix seconds: only calls that changed last at this time or earlier. */
  readonly until: number | null;
}

interface Page {
  readonly calls: readonly Call[];
  /** Where older ones are; null: there are none. A page may have few calls, and still lead on. */
  readonly next: string | null;
}

export interface Calls {
  /** null: not read yet. */
  readonly calls: readonly Call[] | null;
  readonly problem: unknown;
  /** Looks through older calls now. */
  readonly isSearching: boolean;
  readonly isLast: boolean;
  readonly onMore: () => void;
}

export function useCalls(wanted: Wanted): Calls {
  const [newest, setNewest] = useState<readonly Call[] | null>(null);
  const [older, setOlder] = useState<readonly Call[]>([]);
  const [next, setNext] = useState<string | null>(null);
  const [isSearching, setSearching] = useState(false);
  const [problem, setProblem] = useState<unknown>(null);
  const abort = useRef(new AbortController());
  const path = pathOf(wanted);

  /** Read pages from `from` on until there are enough further calls. */
  async function search(from: string, enough: number, signal: AbortSignal): Promise<void> {
    setSearching(true);
    try {
      let found = 0;
      for (let before: string | null = from; before !== null && found < enough && !signal.aborted; ) {
        const page: Page = await get<Page>(`${path}&before=${before}`, signal);
        found += page.calls.length;
        before = page.next;
        setOlder((known) => [...known, ...page.calls]);
        setNext(before);
      }
    } catch (error) {
      if (!signal.aborted) {
        setProblem(error);
      }
    }
    if (!signal.aborted) {
      setSearching(false);
    }
  }

  useEffect(() => {
    const controller = new AbortController();
    abort.current = controller;
    setNewest(null);
    setOlder([]);
    setNext(null);
    setSearching(false);
    let isFirst = true;
    void poll(path, wanted.until === null, controller.signal, setProblem, (page) => {
      setNewest(page.calls);
      if (isFirst) {
        isFirst = false;
        setNext(page.next);
        if (page.next !== null && page.calls.length < PART) {
          void search(page.next, PART - page.calls.length, controller.signal);
        }
      }
    });
    return () => controller.abort();
  }, [path]);

  return {
    calls: newest === null ? null : merged(newest, older),
    problem,
    isSearching,
    isLast: next === null,
    onMore: () => {
      if (next !== null && !isSearching) {
        void search(next, PART, abort.current.signal);
      }
    },
  };
}

function pathOf(wanted: Wanted): string {
  const query = new URLSearchParams({ limit: String(PART) });
  for (const [name, value] of Object.entries(wanted)) {
    if (value) {
      query.set(name, String(value));
    }
  }
  return `/v1/calls?${query.toString()}`;
}

function merged(newest: readonly Call[], older: readonly Call[]): readonly Call[] {
  const ids = new Set(newest.map((each) => each.id));
  return [...newest, ...older.filter((each) => !ids.has(each.id))];
}

async function poll(path: string, repeats: boolean, signal: AbortSignal, fail: (problem: unknown) => void, show: (page: Page) => void): Promise<void> {
  while (!signal.aborted) {
    const since = performance.now();
    try {
      if (!document.hidden) {
        show(await get<Page>(path, signal));
        fail(null);
      }
    } catch (problem) {
      if (signal.aborted) {
        return;
      }
      fail(problem);
    }
    if (!repeats) {
      return;
    }
    const wait = Math.max(LEAST_WAIT_MS, WAIT_PER_COST * (performance.now() - since));
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
