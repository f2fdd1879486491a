/** Charts over time, from the history of the gateway. A gateway without one shows what the page has seen since it was opened. */

import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { useResource } from "../api/resource";
import { Problem } from "../api/request";
import { hasValues, linesOf, RANGES, type History } from "../core/history";
import { Chart, type Series } from "./chart";
import { Empty, ErrorBox, Panel } from "./parts";

const REFRESH_MS = 10_000;

export interface HistoryChart {
  readonly title: string;
  readonly series: readonly (Series & { readonly name: string })[];
  readonly format: (value: number) => string;
}

interface HistoryPanelProps {
  readonly subject: string;
  readonly title?: string;
  readonly charts: readonly HistoryChart[];
  /** What is shown instead by a gateway without a history. */
  readonly children: ComponentChildren;
}

export function HistoryPanel({ subject, title = "History", charts, children }: HistoryPanelProps) {
  const [range, setRange] = useState<keyof typeof RANGES>("1 h");
  const names = charts.flatMap((chart) => chart.series.map((each) => each.name));
  const now = useRounded(REFRESH_MS);
  const query = new URLSearchParams({ subject, series: names.join(","), from: String(now - RANGES[range]), to: String(now) });
  const { data, problem } = useLatest(`/v1/history?${query.toString()}`);
  if (data === null) {
    return problem === null ? null : isMissing(problem) ? <>{children}</> : <ErrorBox error={problem} />;
  }
  return (
    <Panel
      title={title}
      note={`a point is ${data.step < 60 ? `${data.step} s` : `${data.step / 60} min`}`}
      actions={
        <label>
          last{" "}
          <select value={range} onChange={(event) => setRange(event.currentTarget.value as keyof typeof RANGES)}>
            {Object.keys(RANGES).map((each) => (
              <option key={each}>{each}</option>
            ))}
          </select>
        </label>
      }
    >
      <div class="body">
        <div class="columns">
          {charts.map((chart) => (
            <One key={chart.title} chart={chart} history={data} />
          ))}
        </div>
      </div>
    </Panel>
  );
}

function One({ chart, history }: { chart: HistoryChart; history: History }) {
  const lines = useMemo(
    () => linesOf(history, chart.series.map((each) => each.name)),
    [history, chart],
  );
  return (
    <div>
      <h3>{chart.title}</h3>
      {hasValues(lines) ? <Chart label={chart.title} series={chart.series} data={lines} format={chart.format} height={150} /> : <Empty title="Nothing was recorded in this time." />}
    </div>
  );
}

/** The last answer, which stays while the next one is read. */
function useLatest(path: string): { data: History | null; problem: unknown } {
  const { data, problem } = useResource<History>(path);
  const [latest, setLatest] = useState<History | null>(null);
  useEffect(() => {
    if (data !== null) {
      setLatest(data);
    }
  }, [data]);
  return { data: data ?? latest, problem };
}

function useRounded(everyMs: number): number {
  const read = (): number => Math.floor(Date.now() / everyMs) * (everyMs / 1000);
  const [now, setNow] = useState(read);
  useEffect(() => {
    const timer = setInterval(() => {
      if (!document.hidden) {
        setNow(read());
      }
    }, everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

/** Whether the gateway has no history, so that the path is unknown, or none for this session. */
function isMissing(problem: unknown): boolean {
  return problem instanceof Problem && (problem.status === 403 || (problem.status === 404 && problem.code !== "function_not_found"));
}
