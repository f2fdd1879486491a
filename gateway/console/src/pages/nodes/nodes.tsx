import { useLive } from "../../api/live";
import type { Gpu, Nodes, NodeView } from "../../api/views";
import { bytes, number, percent, plural, visible } from "../../core/format";
import { Findings } from "../../ui/findings";
import { Badge, Empty, ErrorBox, LiveMark, Loading, Panel, type Tone } from "../../ui/parts";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";

export default function NodesPage() {
  const { data, connection, problem } = useLive<Nodes>("/v1/console/nodes");
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the nodes" />;
  }
  const nodes = Object.entries(data.nodes);
  return (
    <div class="page">
      <div class="title">
        <h1>Nodes</h1>
        <LiveMark connection={connection} />
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data.findings.length ? (
        <Panel title="Wrong now">
          <Findings findings={data.findings} />
        </Panel>
      ) : null}
      {nodes.length === 0 ? (
        <Panel title="Nodes">
          <Empty title="No node reports.">
            An agent and a runner make a host a node: see "Several machines" in the documentation of operations.
          </Empty>
        </Panel>
      ) : (
        nodes.map(([name, node]) => <Node key={name} name={name} node={node} />)
      )}
    </div>
  );
}

function Node({ name, node }: { name: string; node: NodeView }) {
  const functions = Object.entries(node.functions);
  return (
    <Panel title={name} note={[node.address, node.platform, node.driver ? `driver ${node.driver}` : ""].filter(Boolean).join(" · ")}>
      <dl class="pairs body">
        <dt>Cores</dt>
        <dd>
          {number(node.cores_reserved)} of {number(node.cores)} reserved
        </dd>
        <dt>Memory</dt>
        <dd>
          {bytes(node.memory_reserved_bytes)} of {bytes(node.memory_bytes)} reserved
        </dd>
        <dt>Workers</dt>
        <dd>
          {functions.length === 0 ? "none" : null}
          {functions.map(([each, count], index) => (
            <span key={each}>
              {index ? ", " : ""}
              {count} of <Link to={`/functions/${each}`}>{each}</Link>
            </span>
          ))}
        </dd>
        {Object.entries(node.trouble).map(([subject, text]) => (
          <>
            <dt>No {subject}</dt>
            <dd>{visible(text)}</dd>
          </>
        ))}
      </dl>
      <Gpus gpus={node.gpus} />
    </Panel>
  );
}

const TONES: Readonly<Record<Gpu["health"], Tone>> = { healthy: "ok", degraded: "warn", failed: "bad" };

function Gpus({ gpus }: { gpus: Readonly<Record<string, Gpu>> }) {
  const entries = Object.entries(gpus);
  if (entries.length === 0) {
    return null;
  }
  return (
    <Scroll label={plural(entries.length, "GPU")}>
      <table>
        <thead>
          <tr>
            <th>GPU</th>
            <th>Health</th>
            <th class="number">Busy</th>
            <th class="number">Memory used</th>
            <th class="number">Memory</th>
            <th class="number">Temperature</th>
            <th class="number">Power</th>
            <th>Shared</th>
            <th>Workers</th>
          </tr>
        </thead>
        <tbody>
          {entries.map(([uuid, gpu]) => (
            <tr key={uuid}>
              <td>
                {gpu.kind} <span class="dim mono">{uuid.slice(0, 12)}</span>
              </td>
              <td>
                <Badge tone={TONES[gpu.health]}>{gpu.health}</Badge> {visible(gpu.health_reason)}
              </td>
              <td class="number">{percent(gpu.utilisation)}</td>
              <td class="number">{bytes(gpu.memory_used_bytes)}</td>
              <td class="number">{bytes(gpu.memory_bytes)}</td>
              <td class="number">{gpu.temperature_c === null ? "–" : `${gpu.temperature_c} °C`}</td>
              <td class="number">{gpu.power_w === null ? "–" : `${number(gpu.power_w)} W${gpu.power_limit_w === null ? "" : ` of ${number(gpu.power_limit_w)} W`}`}</td>
              <td>{gpu.mode ?? "–"}</td>
              <td>
                {[...new Set(Object.values(gpu.workers))].map((each, index) => (
                  <span key={each}>
                    {index ? ", " : ""}
                    <Link to={`/functions/${each}`}>{each}</Link>
                  </span>
                ))}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
