/** Events of the platform by day. Pure. */

import type { PlatformEvent } from "../../api/records";

export const KINDS: Readonly<Record<string, string>> = {
  deploy: "deploy",
  rollback: "rollback",
  delete: "delete",
  traffic: "traffic",
  scale: "scale",
  fault: "fault",
  quarantine: "quarantine",
  recovery: "recovery",
  node_up: "node up",
  node_lost: "node lost",
  node_drain: "drain",
  budget: "budget",
};

const TONES: Readonly<Record<string, "ok" | "warn" | "bad" | "info" | "quiet">> = {
  deploy: "info",
  rollback: "warn",
  delete: "warn",
  traffic: "info",
  fault: "bad",
  quarantine: "bad",
  recovery: "ok",
  node_up: "ok",
  node_lost: "bad",
  node_drain: "warn",
  budget: "warn",
};

export function toneOf(kind: string): "ok" | "warn" | "bad" | "info" | "quiet" {
  return TONES[kind] ?? "quiet";
}

/** The events of each day in the zone of the viewer, in the order in which they are given. */
export function byDay(events: readonly PlatformEvent[]): [string, PlatformEvent[]][] {
  const days = new Map<string, PlatformEvent[]>();
  for (const event of events) {
    const day = new Date(event.at * 1000).toLocaleDateString(undefined, { weekday: "long", year: "numeric", month: "long", day: "numeric" });
    days.set(day, [...(days.get(day) ?? []), event]);
  }
  return [...days.entries()];
}

/** "function:prod/search/predict" is a kind and a name. A function of the default app has its short name. */
export function subjectOf(subject: string): { readonly kind: string; readonly name: string } {
  const colon = subject.indexOf(":");
  return { kind: subject.slice(0, Math.max(0, colon)), name: subject.slice(colon + 1) };
}
