import type { FunctionLive, WorkerView } from "../../../api/views";
import { bytes, duration, number, percent, plural, visible } from "../../../core/format";
import { scalingTerms } from "../../../core/scaling-terms";
import { Chart } from "../../../ui/chart";
import { Findings } from "../../../ui/findings";
import { HistoryPanel, type HistoryChart } from "../../../ui/history";
import { Ago, Empty, Panel, Stat } from "../../../ui/parts";
import { Phases } from "../../../ui/phases";
import { useRecent } from "../../../ui/recent";
import { WorkerState, WorkerStates } from "../../../ui/workers";
import { Scroll } from "../../../ui/scroll";

export function StatusTab({ name, live, isLive }: { name: string; live: FunctionLive; isLive: boolean }) {
  return (
    <>
      <dl class="stats">
        <Stat label="Attempts" value={`${number(live.calls_per_s)}/s`} note="last minute" />
        <Stat label="Failed" value={percent(live.error_share)} note={`${number(live.errors_per_s)}/s`} />
        <Stat label="p50" value={duration(live.p50_s)} note="request to result" />
        <Stat label="p99" value={duration(live.p99_s)} note="request to result" />
        <Stat label="Run time" value={duration(live.run_s)} note="mean of an attempt" />
        <Stat label="Queued" value={number(live.queued)} note={`${number(live.running)} running`} />
        {live.gpus ? <Stat label="GPUs charged" value={number(live.gpus)} note="GPU seconds per second" /> : null}
      </dl>
      {live.findings.length ? (
        <Panel title="Problems">
          <Findings findings={live.findings} showSubject={false} />
        </Panel>
      ) : null}
      <Why live={live} />
      <Workers processes={live.processes} />
      <HistoryPanel subject={`function:${name}`} charts={CHARTS}>
        <Live live={live} isLive={isLive} />
      </HistoryPanel>
    </>
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
  {
    title: "Calls, on average",
    series: [
      { name: "queued", label: "queued", color: "--warn" },
      { name: "running", label: "running", color: "--accent" },
    ],
    format: number,
  },
  {
    title: "Workers, on average",
    series: [
      { name: "ready", label: "ready", color: "--ok" },
      { name: "starting", label: "starting", color: "--info" },
      { name: "wanted", label: "wanted", color: "--dim" },
    ],
    format: number,
  },
];

/** Charts of what the page has seen since it was opened. */
function Live({ live, isLive }: { live: FunctionLive; isLive: boolean }) {
  const rates = useRecent(isLive ? [live.calls_per_s, live.errors_per_s] : null);
  const load = useRecent(isLive ? [live.queued, live.running, live.workers["ready"] ?? 0] : null);
  return (
    <>
      <div class="columns">
        {rates ? (
          <Panel title="Attempts per second" note="since this page was opened; means of a minute">
            <Chart
              label="Attempts per second, and failed ones"
              series={[
                { label: "ended", color: "--accent" },
                { label: "failed", color: "--bad" },
              ]}
              data={rates}
              format={(value) => `${number(value)}/s`}
            />
          </Panel>
        ) : null}
        {load ? (
          <Panel title="Calls and workers" note="since this page was opened">
            <Chart
              label="Queued calls, running calls and ready workers"
              series={[
                { label: "queued", color: "--warn" },
                { label: "running", color: "--accent" },
                { label: "ready workers", color: "--ok" },
              ]}
              data={load}
              format={number}
            />
          </Panel>
        ) : null}
      </div>
    </>
  );
}

function Why({ live }: { live: FunctionLive }) {
  const unknown = live.queued === null || live.running === null;
  const wanted = live.wanted ? plural(live.wanted, "worker") : "no workers";
  return (
    <Panel title="Queue and workers" note={Object.keys(live.workers).length ? <WorkerStates counts={live.workers} /> : "no workers"}>
      <dl class="pairs body">
        <dt>Wanted</dt>
        <dd>
          {wanted}: {visible(live.reason).replace(`: ${wanted}`, "") || "the controller has not reported on it yet"}
        </dd>
        <dt>Calls</dt>
        <dd>{unknown ? "not known yet" : `${number(live.queued)} queued, ${number(live.running)} running`}</dd>
        {live.waiting ? (
          <>
            <dt>They wait</dt>
            <dd>
              {visible(live.waiting.detail)} <code class="dim">{live.waiting.reason}</code>
              {live.waiting.eta_s === null ? "" : `, about ${duration(live.waiting.eta_s)} more`}
            </dd>
          </>
        ) : null}
        {live.next ? (
          <>
            <dt>Next revision</dt>
            <dd>
              {live.next.revision}
              {live.next.start_error ? `: ${visible(live.next.start_error.message)}` : " is starting"}
            </dd>
          </>
        ) : null}
        {live.last_start ? (
          <>
            <dt>Last start</dt>
            <dd>
              on {live.last_start.node}, <Ago at={live.last_start.at} />
              <Phases phases={live.last_start.phases} />
            </dd>
          </>
        ) : null}
      </dl>
      <Terms terms={live.terms} />
    </Panel>
  );
}

function Terms({ terms }: { terms: Readonly<Record<string, number>> }) {
  const rows = scalingTerms(terms);
  if (rows.length === 0) {
    return null;
  }
  return (
    <details class="group">
      <summary>How this number was computed</summary>
      <Scroll label="Numbers behind the wanted workers">
        <table>
          <thead>
            <tr>
              <th>Number</th>
              <th class="number">Value</th>
              <th>Meaning</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.name}>
                <td>{row.name}</td>
                <td class="number">{row.value}</td>
                <td class="wrap dim">{row.meaning}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </details>
  );
}

function Workers({ processes }: { processes: Readonly<Record<string, WorkerView>> }) {
  const workers = Object.entries(processes);
  if (workers.length === 0) {
    return (
      <Panel title="Workers">
        <Empty title="No worker runs.">The next call starts one, unless the bounds forbid it.</Empty>
      </Panel>
    );
  }
  return (
    <Panel title="Workers" note={plural(workers.length, "worker")}>
      <Scroll label="Workers">
        <table>
          <thead>
            <tr>
              <th>Worker</th>
              <th>State</th>
              <th>Node</th>
              <th class="number">Revision</th>
              <th class="number">Slots in use</th>
              <th class="number">Memory</th>
              <th>GPU</th>
              <th class="number">GPU memory</th>
              <th class="number">GPU busy</th>
              <th>Started</th>
              <th class="number">Cold start</th>
            </tr>
          </thead>
          <tbody>
            {workers.map(([id, worker]) => (
              <tr key={id}>
                <td class="mono">{id}</td>
                <td>
                  <WorkerState state={worker.state} />
                  {worker.waits_on ? ` waits for ${worker.waits_on}` : ""}
                </td>
                <td>{worker.node}</td>
                <td class="number">{worker.revision}</td>
                <td class="number">
                  {worker.in_use} of {worker.slots}
                  {worker.poisoned ? `, ${worker.poisoned} lost` : ""}
                </td>
                <td class="number">{bytes(worker.memory_bytes)}</td>
                <td>{worker.gpus.join(", ") || <span class="dim">CPU</span>}</td>
                <td class="number">{bytes(worker.gpu_bytes)}</td>
                <td class="number">{percent(worker.gpus_busy)}</td>
                <td>
                  <Ago at={worker.started_at} />
                </td>
                <td class="number">{worker.cold_start ? duration(sum(worker.cold_start)) : "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

function sum(phases: Readonly<Record<string, number>>): number {
  return Object.values(phases).reduce((total, seconds) => total + seconds, 0);
}
