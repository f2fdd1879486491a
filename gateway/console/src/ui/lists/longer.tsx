/** A list of the newest records, and more of them on request. The API returns at most a thousand. */

import { useState } from "preact/hooks";

const STEPS = [50, 200, 1000] as const;

interface MoreProps {
  readonly count: number;
  readonly limit: number;
  readonly onMore: () => void;
}

export function useLimit(): { limit: number; onMore: () => void } {
  const [limit, setLimit] = useState<number>(STEPS[0]);
  return { limit, onMore: () => setLimit(STEPS.find((step) => step > limit) ?? limit) };
}

export function More({ count, limit, onMore }: MoreProps) {
  if (count < limit) {
    return null;
  }
  return (
    <div class="body">
      {limit === STEPS[2] ? (
        <span class="dim">These are the newest thousand. The command line and the API have no more either.</span>
      ) : (
        <span>
          <button type="button" onClick={onMore}>
            Show more
          </button>
        </span>
      )}
    </div>
  );
}
