/** The states of workers, in words and with a colour. */

import type { WorkerCounts } from "../api/views";
import { Badge, type Tone } from "./parts";

const TONES: Readonly<Record<string, Tone>> = {
  ready: "ok",
  starting: "info",
  resuming: "info",
  parking: "quiet",
  parked: "quiet",
  draining: "warn",
  failed: "bad",
};

export function WorkerStates({ counts }: { counts: WorkerCounts }) {
  const entries = Object.entries(counts);
  if (entries.length === 0) {
    return <span class="dim">0</span>;
  }
  return (
    <span class="states">
      {entries.map(([state, count]) => (
        <Badge key={state} tone={TONES[state] ?? "quiet"}>
          {count} {state}
        </Badge>
      ))}
    </span>
  );
}

export function WorkerState({ state }: { state: string }) {
  return <Badge tone={TONES[state] ?? "quiet"}>{state}</Badge>;
}
