/** The phases of a start, as a bar whose parts are as long as they took, and in words. */

import { duration } from "../core/format";

const COLORS: Readonly<Record<string, string>> = {
  place: "quiet",
  fetch: "info",
  launch: "accent",
  load: "warn",
  warm: "ok",
  resume: "info",
};
const SHOWN_S = 0.0005;

export function Phases({ phases }: { phases: Readonly<Record<string, number>> }) {
  const long = Object.entries(phases).filter(([, seconds]) => seconds >= SHOWN_S);
  const total = long.reduce((sum, [, seconds]) => sum + seconds, 0);
  if (total === 0) {
    return null;
  }
  return (
    <span class="phases">
      <span class="bar" aria-hidden="true">
        {long.map(([phase, seconds]) => (
          <span key={phase} class={`part ${COLORS[phase] ?? "quiet"}`} style={{ width: `${(100 * seconds) / total}%` }} />
        ))}
      </span>
      <span>
        {duration(total)}:{" "}
        {long.map(([phase, seconds]) => (
          <span key={phase} class={`key ${COLORS[phase] ?? "quiet"}`}>
            {phase} {duration(seconds)}
          </span>
        ))}
      </span>
    </span>
  );
}
