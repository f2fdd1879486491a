/** A table of a list that the API returns as a whole: its first rows, and more of them on request. */

import type { ComponentChildren, VNode } from "preact";
import { Scroll } from "../scroll";
import { useBounded } from "./bounded";

interface BoundedTableProps<T> {
  readonly label: string;
  readonly rows: readonly T[];
  /** Instead of the table, without rows. */
  readonly empty: VNode;
  readonly head: ComponentChildren;
  /** The row of one item, with a key. */
  readonly children: (item: T) => VNode;
}

export function BoundedTable<T>({ label, rows, empty, head, children }: BoundedTableProps<T>) {
  const { shown, more } = useBounded(rows);
  if (rows.length === 0) {
    return empty;
  }
  return (
    <>
      <Scroll label={label}>
        <table>
          <thead>
            <tr>{head}</tr>
          </thead>
          <tbody>{shown.map(children)}</tbody>
        </table>
      </Scroll>
      {more}
    </>
  );
}
