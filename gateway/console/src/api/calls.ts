/** Submitted calls, page by page: newest first, the first page again every few seconds.
 *
 * Calls that are shown stay shown: new ones wait until the user wants them. Calls that have not ended and are no longer on the first page are read one
 * by one, a few at a time. */

import { useEffect, useRef, useState } from "preact/hooks";
import { begun, extended, inserted, polled, updated, type LiveList } from "../core/data/live-list";
import { get } from "./request";
import type { Call } from "./views";

const PART = 50;
const READ_AT_ONCE = 5;
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
  /** New calls that are not shown yet. */
  readonly waiting: number;
  /** More are new than `waiting`. */
  readonly hasMore: boolean;
  readonly onWaiting: () => void;
  readonly problem: unknown;
  /** Looks through older calls now. */
  readonly isSearching: boolean;
  readonly isLast: boolean;
  readonly onMore: () => void;
}

export function useCalls(wanted: Wanted): Calls {
  const [list, setList] = useState<LiveList<Call> | null>(null);
  const [version, setVersion] = useState(0);
  const latest = useRef(list);
  latest.current = list;
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
        setList((known) => known && extended(known, page.calls));
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
    setList(null);
    setNext(null);
    setSearching(false);
    let count = 0;
    void poll(path, wanted.until === null, controller.signal, setProblem, async (page) => {
      setList((known) => (known === null ? begun(page.calls) : polled(known, page.calls)));
      count += 1;
      if (count > 1) {
        const read = await readAgain(unread(latest.current, page.calls), count, controller.signal);
        setList((known) => known && updated(known, read));
        return;
      }
      setNext(page.next);
      if (page.next !== null && page.calls.length < PART) {
        void search(page.next, PART - page.calls.length, controller.signal);
      }
    });
    return () => controller.abort();
  }, [path, version]);

  return {
    calls: list === null ? null : list.shown,
    waiting: list === null ? 0 : list.waiting.length,
    hasMore: list !== null && list.hasGap,
    onWaiting: () => (list?.hasGap ? setVersion((before) => before + 1) : setList((known) => known && inserted(known))),
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

/** The calls that are shown, have not ended, and are not on the page. */
function unread(list: LiveList<Call> | null, page: readonly Call[]): readonly Call[] {
  const read = new Set(page.map((each) => each.id));
  return (list?.shown ?? []).filter((each) => each.ended_at === null && !read.has(each.id));
}

/** Read a few of the calls, others each time. */
async function readAgain(calls: readonly Call[], turn: number, signal: AbortSignal): Promise<readonly Call[]> {
  const first = calls.length ? (turn * READ_AT_ONCE) % calls.length : 0;
  const some = [...calls.slice(first), ...calls.slice(0, first)].slice(0, READ_AT_ONCE);
  const read = await Promise.allSettled(some.map((each) => get<Call>(`/v1/invocations/${each.id}`, signal)));
  return read.flatMap((each) => (each.status === "fulfilled" ? [each.value] : []));
}

async function poll(path: string, repeats: boolean, signal: AbortSignal, fail: (problem: unknown) => void, show: (page: Page) => Promise<void>): Promise<void> {
  while (!signal.aborted) {
    const since = performance.now();
    try {
      if (!document.hidden) {
        const page = await get<Page>(path, signal);
        fail(null);
        await show(page);
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
