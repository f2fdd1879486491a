/** A call as a timeline. */

import { duration, visible } from "../core/format";
import { placeOf, ticksOf, type Span, type Timeline } from "../core/timeline";

const COLORS: Readonly<Record<Span["kind"], string>> = {
  queue: "quiet",
  place: "quiet",
  fetch: "info",
  launch: "accent",
  load: "warn",
  warm: "ok",
  resume: "info",
  gather: "info",
  run: "ok",
  failed: "bad",
};

export function TimelineView({ timeline }: { timeline: Timeline }) {
  const length = timeline.end - timeline.start;
  return (
    <figure class="timeline" aria-label={`Timeline of ${duration(length)}`}>
      <div class="axis" aria-hidden="true">
        {ticksOf(length).map((at) => (
          <span key={at} style={{ left: `${(100 * at) / length}%` }}>
            {duration(at)}
          </span>
        ))}
      </div>
      {timeline.rows.map((row) => (
        <div class="track" key={row.label}>
          <span class="label">{row.label}</span>
          <span class="line">
            {row.spans.map((span) => {
              const { left, width } = placeOf(span, timeline);
              return (
                <span
                  key={span.label}
                  class={`part ${COLORS[span.kind]}`}
                  style={{ left: `${left}%`, width: `${width}%` }}
                  title={`${visible(span.label)}: ${duration(span.end - span.start)}`}
                />
              );
            })}
          </span>
          <span class="words">
            {row.spans.map((span) => (
              <span key={span.label} class={`key ${COLORS[span.kind]}`}>
                {visible(span.label)} {duration(span.end - span.start)}
              </span>
            ))}
          </span>
        </div>
      ))}
    </figure>
  );
}
