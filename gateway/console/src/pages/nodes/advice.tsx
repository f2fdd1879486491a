import type { Score } from "../../api/views";
import { Badge } from "../../ui/parts";

/** The advice to drain, if the health score gives it. */
export function Advice({ score }: { score: Score }) {
  return score.drain ? <Badge tone="warn">drain it</Badge> : null;
}
