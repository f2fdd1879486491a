/** A value of the API that is read once, and again on request. */

import { useCallback, useEffect, useState } from "preact/hooks";
import { get } from "./request";

export interface Resource<T> {
  readonly data: T | null;
  readonly problem: unknown;
  readonly reload: () => void;
}

/** Read `path` of the API, and again when `version` changes. "" reads nothing. */
export function useResource<T>(path: string, version: unknown = 0): Resource<T> {
  const [state, setState] = useState<{ data: T | null; problem: unknown; path: string }>({ data: null, problem: null, path });
  const [count, setCount] = useState(0);
  useEffect(() => {
    if (!path) {
      return undefined;
    }
    const abort = new AbortController();
    get<T>(path, abort.signal).then(
      (data) => setState({ data, problem: null, path }),
      (problem: unknown) => {
        if (!abort.signal.aborted) {
          setState((before) => ({ data: before.path === path ? before.data : null, problem, path }));
        }
      },
    );
    return () => abort.abort();
  }, [path, version, count]);
  const reload = useCallback(() => setCount((before) => before + 1), []);
  const isCurrent = state.path === path;
  return { data: isCurrent ? state.data : null, problem: isCurrent ? state.problem : null, reload };
}
