import type { Build } from "../../api/records";
import { Badge, type Tone } from "../../ui/parts";

const TONES: Readonly<Record<Build["state"], Tone>> = { pending: "quiet", building: "info", succeeded: "ok", failed: "bad", cancelled: "warn" };

export function BuildState({ build }: { build: Build }) {
  const isEnding = build.cancel && (build.state === "building" || build.state === "pending");
  return <Badge tone={TONES[build.state]}>{isEnding ? "cancelling" : build.state}</Badge>;
}
