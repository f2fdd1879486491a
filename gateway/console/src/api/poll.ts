/** A value of the API that is read again every few seconds while somebody looks. */

import { useCallback, useEffect, useState } from "preact/hooks";
import { get, Problem } from "./request";
import type { Resource } from "./resource";

const WAIT_PER_COST = 10; // a request that takes a second runs every ten seconds

/** Read `path` again every `everyMs`. The last answer stays while the gateway does not respond. "" reads nothing. */
export function usePolled<T>(path: string, everyMs = 3_000): Resource<T> {
  const [state, setState] = useState<{ data: T | null; problem: unknown; path: string }>({ data: null, problem: null, path });
  const [count, setCount] = useState(0);
  useEffect(() => {
    if (!path) {
      return undefined;
    }
    const abort = new AbortController();
    void poll<T>(() => path, everyMs, abort.signal, (data, problem) =>
      setState((before) => ({ data: data ?? (before.path === path ? before.data : null), problem, path })),
    );
    return () => abort.abort();
  }, [path, everyMs, count]);
  const reload = useCallback(() => setCount((before) => before + 1), []);
  const isCurrent = state.path === path;
  return { data: isCurrent ? state.data : null, problem: isCurrent ? state.problem : null, reload };
}

/** Read what `path` returns each time, until a request fails for good. */
export async function poll<T>(path: () => string, everyMs: number, signal: AbortSignal, show: (data: T | null, problem: unknown) => void): Promise<void> {
  while (!signal.aborted) {
    const since = performance.now();
    if (!document.hidden) {
      try {
        show(await get<T>(path(), signal), null);
      } catch (problem) {
        if (signal.aborted) {
          return;
        }
        show(null, problem);
        if (problem instanceof Problem && problem.status >= 400 && problem.status < 500 && problem.status !== 429) {
          return;
        }
      }
    }
    const wait = Math.max(everyMs, WAIT_PER_COST * (performance.now() - since));
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
