/** How much of something is done or used, as a bar with its words beside it. */

import { percent } from "../core/format";

interface BarProps {
  readonly label: string;
  /** From 0 to 1. */
  readonly share: number;
  readonly tone?: "accent" | "ok" | "warn" | "bad";
}

export function Bar({ label, share, tone = "accent" }: BarProps) {
  const part = Math.min(1, Math.max(0, share));
  return (
    <span class="meter" role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={Math.round(100 * part)} title={percent(part)}>
      <span class={`part ${tone}`} style={{ width: `${100 * part}%` }} />
    </span>
  );
}
