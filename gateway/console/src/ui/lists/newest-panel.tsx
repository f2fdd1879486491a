/** A list of the newest records: rows stay where they are, new and older ones come on request. */

import type { VNode } from "preact";
import type { Newest } from "../../api/newest";
import { ErrorBox, Loading, Panel } from "../parts";
import { Waiting } from "./waiting";

interface NewestPanelProps<T> {
  readonly title: string;
  readonly note?: string;
  /** What the list has, such as `build`. */
  readonly what: string;
  readonly newest: Newest<T>;
  readonly children: (rows: readonly T[]) => VNode;
}

export function NewestPanel<T>({ title, note = "newest first", what, newest, children }: NewestPanelProps<T>) {
  const { rows, problem } = newest;
  return (
    <>
      {problem ? <ErrorBox error={problem} /> : null}
      {rows === null ? (
        problem ? null : <Loading what={`the ${what}s`} />
      ) : (
        <Panel title={title} note={note}>
          {rows.length ? <Waiting what={what} count={newest.waiting} hasMore={newest.hasMore} onShow={newest.onWaiting} /> : null}
          {children(rows)}
          {newest.hasOlder ? <Older onOlder={newest.onOlder} /> : null}
        </Panel>
      )}
    </>
  );
}

function Older({ onOlder }: { onOlder: (() => void) | null }) {
  return (
    <div class="body">
      {onOlder === null ? (
        <span class="dim">These are the newest thousand. The command line and the API have no more either.</span>
      ) : (
        <span>
          <button type="button" onClick={onOlder}>
            Show more
          </button>
        </span>
      )}
    </div>
  );
}
