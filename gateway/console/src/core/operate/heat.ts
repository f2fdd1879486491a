/** Measured values of a GPU as shares of their limits, for a heat map. Pure. */

import type { Gpu } from "../../api/views";
import { bytes, NONE, number, percent } from "../format";

export const METRICS = { compute: "Compute", memory: "Memory", temperature: "Temperature", power: "Power" } as const;
export type Metric = keyof typeof METRICS;

export interface Heat {
  /** From 0 to 1; null if it is unknown. */
  readonly share: number | null;
  readonly text: string;
}

const COOL_C = 30;
const HOT_C = 90; // of a GPU that does not report its limit
export const LEVELS = 10;

export function heatOf(metric: Metric, gpu: Gpu): Heat {
  switch (metric) {
    case "compute":
      return { share: gpu.utilisation, text: percent(gpu.utilisation) };
    case "memory":
      return { share: ratio(gpu.memory_used_bytes, gpu.memory_bytes), text: gpu.memory_used_bytes === null ? NONE : bytes(gpu.memory_used_bytes) };
    case "temperature": {
      const limit = (gpu.temperature_limit_c ?? HOT_C) - COOL_C;
      return { share: gpu.temperature_c === null ? null : ratio(gpu.temperature_c - COOL_C, limit), text: gpu.temperature_c === null ? NONE : `${gpu.temperature_c} °C` };
    }
    case "power":
      return { share: ratio(gpu.power_w, gpu.power_limit_w), text: gpu.power_w === null ? NONE : `${number(gpu.power_w)} W` };
  }
}

function ratio(value: number | null, limit: number | null): number | null {
  return value === null || !limit ? null : Math.min(1, Math.max(0, value / limit));
}

/** The class of a cell: heat-0 to heat-10, or heat-none. */
export function heatClass(share: number | null): string {
  return share === null ? "heat-none" : `heat-${Math.round(share * LEVELS)}`;
}

/** The first characters of a uuid that tell GPUs apart. */
export function shortUuid(uuid: string): string {
  return uuid.slice(0, 12);
}
