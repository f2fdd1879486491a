/** The rows of a long table. The gateway sends a part of them; spacers stand for the others, so the scroll bar is right. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { Scroll } from "./scroll";

const ROW_PX = 29;

interface VirtualRowsProps {
  readonly total: number;
  /** The number of the first row that is present. */
  readonly offset: number;
  readonly count: number;
  /** A part begins at a multiple of this many rows. */
  readonly step: number;
  readonly onOffset: (offset: number) => void;
  readonly head: ComponentChildren;
  readonly children: ComponentChildren;
}

export function VirtualRows({ total, offset, count, step, onOffset, head, children }: VirtualRowsProps) {
  const body = useRef<HTMLTableSectionElement>(null);
  useEffect(() => {
    let frame = 0;
    const update = (): void => {
      cancelAnimationFrame(frame);
      frame = requestAnimationFrame(() => {
        const top = body.current?.getBoundingClientRect().top ?? 0;
        onOffset(partAt(-top, step));
      });
    };
    addEventListener("scroll", update, { passive: true });
    return () => {
      removeEventListener("scroll", update);
      cancelAnimationFrame(frame);
    };
  }, [step, onOffset]);
  const after = Math.max(0, total - offset - count);
  return (
    <Scroll label="List">
      <table aria-rowcount={total}>
        <thead>{head}</thead>
        <tbody ref={body}>
          {offset > 0 ? <Spacer rows={offset} /> : null}
          {children}
          {after > 0 ? <Spacer rows={after} /> : null}
        </tbody>
      </table>
    </Scroll>
  );
}

/** The part that covers the screen whose top is `px` below the first row. */
function partAt(px: number, step: number): number {
  const first = Math.max(0, Math.floor(px / ROW_PX) - step / 2);
  return Math.floor(first / step) * step;
}

function Spacer({ rows }: { rows: number }) {
  return (
    <tr aria-hidden="true">
      <td style={{ height: `${rows * ROW_PX}px`, padding: 0 }} colSpan={99} />
    </tr>
  );
}
