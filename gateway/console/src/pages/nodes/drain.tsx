/** The drain of a node: its state, and the button that begins or ends it. */

import { useMay } from "../../api/principal";
import { send } from "../../api/request";
import type { Drain, NodeView } from "../../api/views";
import { plural, visible } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Ago, Badge } from "../../ui/parts";

export function workersOf(node: NodeView): number {
  return Object.values(node.functions).reduce((sum, count) => sum + count, 0);
}

export function DrainBadge({ node }: { node: NodeView }) {
  if (node.drained === null) {
    return null;
  }
  return <Badge tone="warn">{workersOf(node) ? `draining, ${plural(workersOf(node), "worker")} left` : "drained"}</Badge>;
}

export function DrainedSince({ drain }: { drain: Drain }) {
  return (
    <>
      <Ago at={drain.since} />
      {drain.by ? `, by ${visible(drain.by)}` : ""}
    </>
  );
}

interface ButtonProps {
  readonly name: string;
  /** Names the button to screen readers, where it is in many rows. */
  readonly of?: string;
}

export function DrainButton({ name, node, of }: ButtonProps & { readonly node: NodeView }) {
  const isAdmin = useMay("admin");
  if (node.drained !== null) {
    return <EndDrain name={name} {...(of ? { of } : {})} />;
  }
  return isAdmin ? (
    <Ask label="Drain" {...(of ? { of } : {})} title={`Drain ${name}?`} isDangerous onSubmit={async () => void (await send(pathOf(name), { method: "PUT" }))}>
      <p>
        No new worker starts on the node. Its {plural(workersOf(node), "worker")} finish their calls, and others start on other nodes first, if these have room.
      </p>
      <p class="dim">The node stays drained after restarts, until you end the drain.</p>
    </Ask>
  ) : null;
}

export function EndDrain({ name, of }: ButtonProps) {
  const isAdmin = useMay("admin");
  return isAdmin ? (
    <Ask label="End the drain" {...(of ? { of } : {})} title={`Let ${name} accept workers again?`} action="End the drain" onSubmit={async () => void (await send(pathOf(name), { method: "DELETE" }))}>
      <p>New workers may start on the node.</p>
    </Ask>
  ) : null;
}

function pathOf(name: string): string {
  return `/v1/nodes/${encodeURIComponent(name)}/drain`;
}
