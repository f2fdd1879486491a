import { useLive } from "../../api/live";
import type { FunctionRow, Overview, Sum } from "../../api/views";
import { bytes, duration, number, percent, plural } from "../../core/format";
import { Chart } from "../../ui/chart";
import { Findings } from "../../ui/findings";
import { HistoryPanel, type HistoryChart } from "../../ui/history";
import { memo } from "../../ui/memo";
import { Empty, ErrorBox, LiveMark, Loading, Panel, Stat } from "../../ui/parts";
import { useRecent } from "../../ui/recent";
import { Link } from "../../ui/router";
import { WorkerStates } from "../../ui/workers";
import { Scroll } from "../../ui/scroll";

export default function OverviewPage() {
  const { data, connection, problem } = useLive<Overview>("/v1/console/overview");
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the overview" />;
  }
  if (data.total.functions === 0) {
    return <NoFunctions />;
  }
  return (
    <div class="page">
      <div class="title">
        <h1>Overview</h1>
        <LiveMark connection={connection} />
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      <Totals overview={data} />
      <Panel title="Problems" note={data.findings.length ? plural(data.findings.length, "finding") : ""}>
        <Findings findings={data.findings} />
      </Panel>
      <HistoryPanel subject="overview" charts={CHARTS}>
        <Live total={data.total} isLive={connection === "live"} />
      </HistoryPanel>
      <Busiest rows={data.busiest} all={data.total.functions} />
      <Apps apps={data.apps} all={data.total.apps} />
    </div>
  );
}

const CHARTS: readonly HistoryChart[] = [
  {
    title: "Attempts per second",
    series: [
      { name: "calls", label: "ended", color: "--accent" },
      { name: "failed", label: "failed", color: "--bad" },
    ],
    format: (value) => `${number(value)}/s`,
  },
  {
    title: "Time from request to result",
    series: [
      { name: "p50", label: "p50", color: "--ok" },
      { name: "p99", label: "p99", color: "--warn" },
    ],
    format: duration,
  },
];

/** A chart of what the page has seen since it was opened. */
function Live({ total, isLive }: { total: Sum; isLive: boolean }) {
  const recent = useRecent(isLive ? [total.calls_per_s, total.errors_per_s] : null);
  return recent ? (
    <Panel title="Attempts per second" note="since this page was opened; each point is the mean of the last minute">
      <Chart
        label="Attempts per second, and failed ones"
        series={[
          { label: "ended", color: "--accent" },
          { label: "failed", color: "--bad" },
        ]}
        data={recent}
        format={(value) => `${number(value)}/s`}
      />
    </Panel>
  ) : null;
}

function NoFunctions() {
  return (
    <Panel title="Functions">
      <Empty title="No function is deployed.">
        <p>Write one, and deploy it:</p>
        <pre>gpufn init my-project && cd my-project && gpufn deploy app.py</pre>
        <p>It appears here by itself.</p>
      </Empty>
    </Panel>
  );
}

function Totals({ overview: { total, nodes } }: { overview: Overview }) {
  return (
    <dl class="stats">
      <Stat label="Attempts" value={`${number(total.calls_per_s)}/s`} note="last minute" />
      <Stat label="Failed" value={percent(total.error_share)} note={`${number(total.errors_per_s)}/s`} />
      <Stat label="p50" value={duration(total.p50_s)} note="request to result" />
      <Stat label="p99" value={duration(total.p99_s)} note="request to result" />
      <Stat label="Queued" value={number(total.queued)} note={`${number(total.running)} running`} />
      <Stat label="Workers" value={<WorkerStates counts={total.workers} />} />
      {nodes ? <Gpus nodes={nodes} /> : null}
      <Stat label="Functions" value={number(total.functions)} note={plural(total.apps, "app")} />
    </dl>
  );
}

function Gpus({ nodes: { count, gpus } }: { nodes: NonNullable<Overview["nodes"]> }) {
  if (gpus.count === 0) {
    return <Stat label="Nodes" value={number(count)} note="no GPU" />;
  }
  const memory = gpus.memory_used_bytes === null ? "" : `${bytes(gpus.memory_used_bytes)} of ${bytes(gpus.memory_bytes)}`;
  const note = memory || `on ${plural(count, "node")}`;
  return <Stat label={`${plural(gpus.count, "GPU")} busy`} value={percent(gpus.busy)} note={note} />;
}

function Busiest({ rows, all }: { rows: Readonly<Record<string, FunctionRow>>; all: number }) {
  return (
    <Panel title="Functions with the most calls" actions={<Link to="/functions">All {plural(all, "function")}</Link>}>
      <Scroll label="Functions with the most calls">
        <table>
          <thead>
            <tr>
              <th>Function</th>
              <RateHeads />
              <th class="number">Queued</th>
              <th>Workers</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(rows).map(([name, row]) => (
              <BusyRow key={name} name={name} row={row} />
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

const BusyRow = memo(function BusyRow({ name, row }: { name: string; row: FunctionRow }) {
  return (
    <tr>
      <td class="name">
        <Link to={`/functions/${name}`}>{name}</Link>
      </td>
      <RateCells rates={row} />
      <td class="number">{number(row.queued)}</td>
      <td>
        <WorkerStates counts={row.workers} />
      </td>
    </tr>
  );
});

function Apps({ apps, all }: { apps: Readonly<Record<string, Sum>>; all: number }) {
  const shown = Object.keys(apps).length;
  return (
    <Panel title="Apps" note={all > shown ? `the ${shown} with the most calls, of ${all}` : ""}>
      <Scroll label="Apps">
        <table>
          <thead>
            <tr>
              <th>Environment / app</th>
              <th class="number">Functions</th>
              <RateHeads />
              <th class="number">Queued</th>
              <th>Workers</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(apps).map(([name, app]) => (
              <AppRow key={name} name={name} app={app} />
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

const AppRow = memo(function AppRow({ name, app }: { name: string; app: Sum }) {
  return (
    <tr>
      <td class="name">
        <Link to="/functions" query={{ search: name === "default/default" ? "" : `${name}/` }}>
          {name}
        </Link>
      </td>
      <td class="number">{number(app.functions)}</td>
      <RateCells rates={app} />
      <td class="number">{number(app.queued)}</td>
      <td>
        <WorkerStates counts={app.workers} />
      </td>
    </tr>
  );
});

function RateHeads() {
  return (
    <>
      <th class="number">Attempts/s</th>
      <th class="number">Failed</th>
      <th class="number">p50</th>
      <th class="number">p99</th>
    </>
  );
}

function RateCells({ rates }: { rates: Sum | FunctionRow }) {
  return (
    <>
      <td class="number">{number(rates.calls_per_s)}</td>
      <td class="number">{percent(rates.error_share)}</td>
      <td class="number">{duration(rates.p50_s)}</td>
      <td class="number">{duration(rates.p99_s)}</td>
    </>
  );
}
