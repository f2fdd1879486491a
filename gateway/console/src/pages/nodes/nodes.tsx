import { useLive } from "../../api/live";
import type { Drain, Nodes, NodeView } from "../../api/views";
import { bytes, number, plural, visible } from "../../core/format";
import { METRICS, type Metric } from "../../core/operate/heat";
import { Findings } from "../../ui/findings";
import { Badge, Empty, ErrorBox, LiveMark, Loading, Panel } from "../../ui/parts";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";
import { FunctionCounts } from "./function-counts";
import { Advice } from "./advice";
import { DrainBadge, DrainButton, DrainedSince, EndDrain } from "./drain";
import { HeatMap } from "./heat-map";

export default function NodesPage({ query }: PageProps) {
  const { data, connection, problem } = useLive<Nodes>("/v1/console/nodes");
  const metric = (query["metric"] ?? "") in METRICS ? (query["metric"] as Metric) : "compute";
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the nodes" />;
  }
  return (
    <div class="page">
      <div class="title">
        <h1>Nodes</h1>
        <LiveMark connection={connection} />
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data.findings.length ? (
        <Panel title="Problems">
          <Findings findings={data.findings} />
        </Panel>
      ) : null}
      <HeatMap nodes={data.nodes} metric={metric} />
      <Panel title="Nodes" note={plural(Object.keys(data.nodes).length, "node")}>
        <NodeTable nodes={Object.entries(data.nodes)} />
      </Panel>
      <NotReporting drains={Object.entries(data.not_reporting)} />
    </div>
  );
}

function NodeTable({ nodes }: { nodes: readonly [string, NodeView][] }) {
  if (nodes.length === 0) {
    return (
      <Empty title="No node reports.">
        An agent and a runner make a host a node: see "Several machines" in the documentation of operations.
      </Empty>
    );
  }
  return (
    <Scroll label="Nodes">
      <table>
        <thead>
          <tr>
            <th>Node</th>
            <th>Health</th>
            <th class="number">GPUs</th>
            <th class="number">Cores reserved</th>
            <th class="number">Memory reserved</th>
            <th>Address</th>
            <th>Workers</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {nodes.map(([name, node]) => (
            <tr key={name}>
              <td>
                <Link to={`/nodes/${name}`}>{name}</Link>
              </td>
              <td>
                <Health node={node} /> <DrainBadge node={node} />
              </td>
              <td class="number">{Object.keys(node.gpus).length}</td>
              <td class="number">
                {number(node.cores_reserved)} of {number(node.cores)}
              </td>
              <td class="number">
                {bytes(node.memory_reserved_bytes)} of {bytes(node.memory_bytes)}
              </td>
              <td class="mono">{visible(node.address)}</td>
              <td class="reason">
                <FunctionCounts functions={node.functions} />
              </td>
              <td>
                <span class="row-actions">
                  <DrainButton name={name} node={node} of={name} />
                </span>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

/** Nobody sees such a node in the list of nodes, and it would be drained when it comes back. */
function NotReporting({ drains }: { drains: readonly [string, Drain][] }) {
  if (drains.length === 0) {
    return null;
  }
  return (
    <Panel title="Drained nodes that do not report" note={plural(drains.length, "node")}>
      <Scroll label="Drained nodes that do not report">
        <table>
          <thead>
            <tr>
              <th>Node</th>
              <th>Drained</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {drains.map(([name, drain]) => (
              <tr key={name}>
                <td>
                  <Link to={`/nodes/${name}`}>{name}</Link>
                </td>
                <td>
                  <DrainedSince drain={drain} />
                </td>
                <td>
                  <span class="row-actions">
                    <EndDrain name={name} of={name} />
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

function Health({ node }: { node: NodeView }) {
  const ill = Object.values(node.gpus).filter((gpu) => gpu.health !== "healthy");
  const isFailed = ill.some((gpu) => gpu.health === "failed");
  return (
    <>
      {ill.length ? <Badge tone={isFailed ? "bad" : "warn"}>{plural(ill.length, "GPU")} not healthy</Badge> : <Badge tone="ok">healthy</Badge>}{" "}
      <Advice score={node.score} />
    </>
  );
}
