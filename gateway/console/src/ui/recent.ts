/** The values of a live page since it was opened, for a chart. */

import { useEffect, useRef, useState } from "preact/hooks";

const LONGEST = 600; // points: ten minutes

export type Recent = readonly [readonly number[], ...(readonly (number | null)[])[]];

/** Add the values once a second while the page is live. */
export function useRecent(values: readonly (number | null)[] | null): Recent | null {
  const latest = useRef(values);
  latest.current = values;
  const [points, setPoints] = useState<Recent | null>(null);
  useEffect(() => {
    const timer = setInterval(() => {
      const current = latest.current;
      if (current !== null && !document.hidden) {
        setPoints((before) => withPoint(before, Date.now() / 1000, current));
      }
    }, 1000);
    return () => clearInterval(timer);
  }, []);
  return points;
}

function withPoint(before: Recent | null, at: number, values: readonly (number | null)[]): Recent {
  const [times, ...series] = before ?? [[], ...values.map(() => [])];
  return [[...times, at].slice(-LONGEST), ...values.map((value, index) => [...(series[index] ?? []), value].slice(-LONGEST))];
}
