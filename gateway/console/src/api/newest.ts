/** The newest records of a kind, read again every few seconds: up to a thousand, as many as the API lists.
 *
 * Records that are shown stay shown until they are deleted: new ones wait until the user wants them. Each request asks for as many records as the user
 * has, with the waiting ones, so all of them are up to date. */

import { useEffect, useRef, useState } from "preact/hooks";
import { begun, inserted, reread, type LiveList, type Row } from "../core/data/live-list";
import { poll } from "./poll";

const STEPS = [50, 200, 1000] as const;
const MOST = STEPS[2];

export interface Newest<T> {
  /** null: not read yet. */
  readonly rows: readonly T[] | null;
  /** New records that are not shown yet. */
  readonly waiting: number;
  /** More are new than `waiting`. */
  readonly hasMore: boolean;
  readonly onWaiting: () => void;
  readonly problem: unknown;
  /** There may be older ones. */
  readonly hasOlder: boolean;
  /** null: the API lists no others. */
  readonly onOlder: (() => void) | null;
  readonly reload: () => void;
}

interface State<T extends Row> {
  readonly path: string;
  readonly list: LiveList<T> | null;
  readonly problem: unknown;
}

/** Show the list in `member` of what `path` of the API returns. */
export function useNewest<T extends Row>(path: string, member: string, everyMs = 3_000): Newest<T> {
  const [stored, setState] = useState<State<T>>({ path, list: null, problem: null });
  const [wanted, setWanted] = useState<number>(STEPS[0]);
  const [version, setVersion] = useState(0);
  const state = stored.path === path ? stored : { path, list: null, problem: null };
  const latest = useRef(state);
  latest.current = state;
  useEffect(() => {
    const abort = new AbortController();
    let limit = wanted;
    const next = (): string => {
      const { list } = latest.current;
      limit = list === null ? wanted : Math.min(MOST, Math.max(wanted, list.shown.length) + list.waiting.length);
      return `${path}${path.includes("?") ? "&" : "?"}limit=${limit}`;
    };
    void poll<Record<string, readonly T[]>>(next, everyMs, abort.signal, (data, problem) => {
      const page = data?.[member];
      setState((before) => {
        const list = before.path === path ? before.list : null;
        if (page === undefined) {
          return { path, list, problem };
        }
        return { path, list: list === null ? begun(page) : reread(list, page, page.length < limit), problem };
      });
    });
    return () => abort.abort();
  }, [path, member, everyMs, wanted, version]);
  const { list } = state;
  const reload = (): void => setVersion((before) => before + 1);
  const further = STEPS.find((step) => step > wanted);
  return {
    rows: list === null ? null : list.shown,
    waiting: list === null ? 0 : list.waiting.length,
    hasMore: list !== null && list.hasGap,
    onWaiting: () => {
      setState((before) => ({ ...before, list: before.list === null || before.list.hasGap ? null : inserted(before.list) }));
      reload();
    },
    problem: state.problem,
    hasOlder: list !== null && list.shown.length >= wanted,
    onOlder: further === undefined ? null : () => setWanted(further),
    reload,
  };
}
