/** Nested spans on a line of time each. The parts that decided the end are strong, the others pale. */

import type { ComponentChildren } from "preact";
import { duration, percent, visible } from "../core/format";
import type { Part, PathSpan, Row } from "../core/path/critical";
import { ticksOf } from "../core/timeline";
import { useBounded } from "./lists/bounded";

interface CriticalPathProps<T extends PathSpan> {
  readonly root: PathSpan;
  readonly rows: readonly Row<T>[];
  readonly parts: readonly Part[];
  readonly nameOf: (span: T) => ComponentChildren;
  readonly isFailed: (span: T) => boolean;
}

export function CriticalPath<T extends PathSpan>({ root, rows, parts, nameOf, isFailed }: CriticalPathProps<T>) {
  const { shown, more } = useBounded(rows);
  const length = Math.max(root.end - root.start, 1e-6);
  const place = (start: number, end: number): { left: string; width: string } => {
    const left = Math.min(Math.max((start - root.start) / length, 0), 1);
    const right = Math.min(Math.max((end - root.start) / length, 0), 1);
    return { left: `${100 * left}%`, width: `${100 * (right - left)}%` };
  };
  return (
    <>
      <figure class="timeline path" aria-label={`Nested calls and the critical path of ${duration(length)}`}>
        <div class="axis" aria-hidden="true">
          {ticksOf(length).map((at) => (
            <span key={at} style={{ left: `${(100 * at) / length}%` }}>
              {duration(at)}
            </span>
          ))}
        </div>
        {shown.map(({ span, depth }) => {
          const own = parts.filter((part) => part.id === span.id);
          const onPath = own.reduce((sum, part) => sum + part.end - part.start, 0);
          const took = duration(span.end - span.start);
          return (
            <div class="track" key={span.id}>
              <span class={`label depth-${Math.min(depth, 8)}`}>{nameOf(span)}</span>
              <span class="line">
                <span class={`part pale ${isFailed(span) ? "bad" : ""}`} style={place(span.start, span.end)} title={`${visible(span.name)}: ${took}`} />
                {own.map((part) => (
                  <span key={part.start} class={`part ${isFailed(span) ? "bad" : "accent"}`} style={place(part.start, part.end)} title={`on the path: ${duration(part.end - part.start)}`} />
                ))}
              </span>
              <span class="words">
                {took}
                {onPath > 0 ? <strong title={`${duration(onPath)} on the path`}>{percent(onPath / length)}</strong> : null}
              </span>
            </div>
          );
        })}
        <figcaption>
          <span class="key accent">on the critical path, with its share of the time</span>
          <span class="key pale">not on it</span>
        </figcaption>
      </figure>
      {more}
    </>
  );
}
