/** The first rows of a list that the API returns as a whole, and more on request. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { number } from "../../core/format";

const STEP = 100;

export function useBounded<T>(items: readonly T[]): { shown: readonly T[]; more: ComponentChildren } {
  const [count, setCount] = useState(STEP);
  const more =
    items.length > count ? (
      <div class="body">
        <span>
          <button type="button" onClick={() => setCount(count + STEP)}>
            Show more
          </button>{" "}
          <span class="dim">
            {number(count)} of {number(items.length)}
          </span>
        </span>
      </div>
    ) : null;
  return { shown: items.slice(0, count), more };
}
