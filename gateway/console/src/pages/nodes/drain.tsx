/** The drain of a node: its state, and the button that begins or ends it. */

import { useMay } from "../../api/principal";
import { send } from "../../api/request";
import type { NodeView } from "../../api/views";
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

export function DrainedSince({ node }: { node: NodeView }) {
  return node.drained === null ? null : (
    <>
      <Ago at={node.drained.since} />
      {node.drained.by ? `, by ${visible(node.drained.by)}` : ""}
    </>
  );
}

export function DrainButton({ name, node, of }: { name: string; node: NodeView; of?: string }) {
  const isAdmin = useMay("admin");
  if (!isAdmin) {
    return null;
  }
  const path = `/v1/nodes/${encodeURIComponent(name)}/drain`;
  const named = of ? { of } : {};
  if (node.drained !== null) {
    return (
      <Ask label="End the drain" {...named} title={`Let ${name} accept workers again?`} action="End the drain" onSubmit={async () => void (await send(path, { method: "DELETE" }))}>
        <p>New workers may start on the node.</p>
      </Ask>
    );
  }
  return (
    <Ask label="Drain" {...named} title={`Drain ${name}?`} isDangerous onSubmit={async () => void (await send(path, { method: "PUT" }))}>
      <p>
        No new worker starts on the node. Its {plural(workersOf(node), "worker")} finish their calls, and others start on other nodes first, if these have room.
      </p>
      <p class="dim">The node stays drained after restarts, until you end the drain.</p>
    </Ask>
  );
}
