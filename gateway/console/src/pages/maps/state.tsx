import type { MapStatus } from "../../api/records";
import { Badge, type Tone } from "../../ui/parts";

const TONES: Readonly<Record<MapStatus["state"], Tone>> = { open: "info", running: "info", ended: "ok", cancelled: "warn" };

/** The state of a map. An open one still accepts items. */
export function MapState({ state }: { state: MapStatus["state"] }) {
  return <Badge tone={TONES[state]}>{state}</Badge>;
}
