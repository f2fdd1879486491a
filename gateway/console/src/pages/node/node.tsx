import { useLive } from "../../api/live";
import type { Nodes, NodeView } from "../../api/views";
import { bytes, duration, number, percent, plural, visible } from "../../core/format";
import { shortUuid } from "../../core/operate/heat";
import { HistoryPanel, type HistoryChart } from "../../ui/history";
import { Findings } from "../../ui/findings";
import { Empty, ErrorBox, LiveMark, Loading, Panel, Stat } from "../../ui/parts";
import { Link } from "../../ui/router";
import type { PageProps } from "..";
import { DrainBadge, DrainButton, DrainedSince, EndDrain, workersOf } from "../nodes/drain";
import { FunctionCounts } from "../nodes/function-counts";
import { Gpus } from "./gpus";

export default function NodePage({ parameters, query }: PageProps) {
  const name = parameters["name"] ?? "";
  const { data, connection, problem } = useLive<Nodes>("/v1/console/nodes");
  const node = data?.nodes[name];
  const drain = data?.not_reporting[name];
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the node" />;
  }
  const findings = data.findings.filter((each) => each.kind === "node" && each.subject === name);
  const gpu = query["gpu"] ?? "";
  return (
    <div class="page">
      <div class="title">
        <h1>{name}</h1>
        <LiveMark connection={connection} />
        {node ? <DrainBadge node={node} /> : null}
        {node ? <span class="dim">{[node.platform, node.driver ? `driver ${node.driver}` : "", node.cuda ? `CUDA ${node.cuda}` : ""].filter(Boolean).join(" · ")}</span> : null}
        <span class="actions">
          <Link to="/events" query={{ subject: `node:${name}` }} class="button">
            Events
          </Link>
          {node ? <DrainButton name={name} node={node} /> : drain ? <EndDrain name={name} /> : null}
        </span>
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {findings.length ? (
        <Panel title="Problems">
          <Findings findings={findings} showSubject={false} />
        </Panel>
      ) : null}
      {node ? (
        <Present name={name} node={node} gpu={gpu} />
      ) : (
        <Panel title="Node">
          <Empty title="This node does not report.">
            It has never reported, or not in the last seconds.{" "}
            {drain ? (
              <>
                It was drained <DrainedSince drain={drain} />: no worker starts on it until the drain ends.{" "}
              </>
            ) : null}
            <Link to="/nodes">Go to the nodes</Link>
          </Empty>
        </Panel>
      )}
      {node && gpu in node.gpus ? (
        <HistoryPanel key={gpu} subject={`gpu:${gpu}`} title={`History of ${node.gpus[gpu]?.kind ?? ""} ${shortUuid(gpu)}`} charts={OF_GPU}>
          <NoHistory />
        </HistoryPanel>
      ) : null}
      <HistoryPanel subject={`node:${name}`} title="History of the node" charts={node && Object.keys(node.gpus).length === 0 ? OF_CPU_NODE : OF_NODE}>
        <NoHistory />
      </HistoryPanel>
    </div>
  );
}

function Present({ name, node, gpu }: { name: string; node: NodeView; gpu: string }) {
  return (
    <>
      <dl class="stats">
        <Stat label="GPUs" value={Object.keys(node.gpus).length} note={node.mps === "none" ? "no MPS" : `MPS ${node.mps.replace("_", " ")}`} />
        <Stat label="Health score" value={number(node.score.value)} note={node.score.drain ? "below 0.5: drain it" : "of 1, from the last hour"} />
        <Stat label="Workers" value={workersOf(node)} note={plural(Object.keys(node.functions).length, "function")} />
        <Stat label="Cores reserved" value={number(node.cores_reserved)} note={`of ${number(node.cores)}`} />
        <Stat label="Memory reserved" value={bytes(node.memory_reserved_bytes)} note={`of ${bytes(node.memory_bytes)}`} />
        <Stat label="Clock" value={node.clock_skew_s === null ? "–" : duration(node.clock_skew_s)} note="from that of the bus" />
      </dl>
      <Panel title="Workers" note={node.address}>
        <dl class="pairs body">
          <dt>Functions</dt>
          <dd>
            <FunctionCounts functions={node.functions} />
          </dd>
          {node.drained ? (
            <>
              <dt>Drained</dt>
              <dd>
                <DrainedSince drain={node.drained} />
              </dd>
            </>
          ) : null}
          {node.score.reasons.length ? (
            <>
              <dt>Health score</dt>
              <dd>{visible(node.score.reasons.join("; "))}</dd>
            </>
          ) : null}
          {Object.entries(node.trouble).map(([subject, text]) => (
            <>
              <dt>No {subject}</dt>
              <dd>{visible(text)}</dd>
            </>
          ))}
        </dl>
      </Panel>
      <Gpus node={name} gpus={node.gpus} chosen={gpu} />
    </>
  );
}

function NoHistory() {
  return (
    <Panel title="History">
      <Empty title="No history is kept about it, or none yet." />
    </Panel>
  );
}

const share = (value: number): string => percent(value);
const watts = (value: number): string => `${number(value)} W`;

const WORKERS: HistoryChart = { title: "Workers, on average", series: [{ name: "workers", label: "workers", color: "--accent" }], format: number };
const MEMORY: HistoryChart = { title: "Memory of the workers", series: [{ name: "memory", label: "memory", color: "--info" }], format: bytes };
const UTILISATION: HistoryChart = { title: "GPU busy", series: [{ name: "utilisation", label: "busy", color: "--accent" }], format: share };
const POWER: HistoryChart = { title: "Power", series: [{ name: "power", label: "power", color: "--warn" }], format: watts };
const CALLS: HistoryChart = {
  title: "Attempts per second",
  series: [
    { name: "calls", label: "ended", color: "--accent" },
    { name: "failed", label: "failed", color: "--bad" },
  ],
  format: (value) => `${number(value)}/s`,
};
const OF_CPU_NODE: readonly HistoryChart[] = [CALLS, WORKERS, MEMORY];
const OF_NODE: readonly HistoryChart[] = [CALLS, WORKERS, UTILISATION, POWER];
const OF_GPU: readonly HistoryChart[] = [
  UTILISATION,
  { title: "Memory in use", series: [{ name: "memory", label: "memory", color: "--info" }], format: bytes },
  { title: "Temperature", series: [{ name: "temperature", label: "temperature", color: "--bad" }], format: (value) => `${number(value)} °C` },
  POWER,
];
