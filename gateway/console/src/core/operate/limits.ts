/** Limits of keys and teams in words. Pure. */

import type { KeyLimits } from "../../api/records";
import { number } from "../format";

const PER = [
  ["s", 1],
  ["min", 60],
  ["h", 3_600],
] as const;

/** A rate as a person writes it: 50/s, 90/min, 1000/h. */
export function rateText(perSecond: number): string {
  for (const [unit, seconds] of PER) {
    const calls = Math.round(perSecond * seconds * 1e6) / 1e6;
    if (calls >= 1 && Number.isInteger(calls)) {
      return `${calls}/${unit}`;
    }
  }
  return `${number(perSecond)}/s`;
}

/** Calls per second from 50/s, 600/min or 1000/h; null if the text is none of these. */
export function rateOf(text: string): number | null {
  const match = /^(\d+(?:\.\d+)?)\/(s|min|h)$/.exec(text.trim());
  const seconds = PER.find(([unit]) => unit === match?.[2])?.[1];
  return match && seconds && Number(match[1]) > 0 ? Number(match[1]) / seconds : null;
}

export function limitsText(limits: KeyLimits): string {
  const parts = [
    isSet(limits.rate) ? `${rateText(limits.rate)}${isSet(limits.burst) ? ` (burst ${number(limits.burst)})` : ""}` : "",
    isSet(limits.concurrency) ? `${number(limits.concurrency)} in flight` : "",
    isSet(limits.queued) ? `${number(limits.queued)} queued` : "",
    isSet(limits.run_s) ? `${number(limits.run_s)} run s/day` : "",
    isSet(limits.gpu_s) ? `${number(limits.gpu_s)} GPU s/day` : "",
  ];
  return parts.filter(Boolean).join(", ") || "none";
}

function isSet(value: number | null | undefined): value is number {
  return value !== null && value !== undefined;
}
