import { useMemo } from "preact/hooks";
import { useResource } from "../../api/resource";
import { duration, energy, number, percent } from "../../core/format";
import { dayOf, daysFrom, totals, type Group, type Total, type UsageRow } from "../../core/operate/usage";
import { DayBars } from "../../ui/day-bars";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { ListAll, useCharged } from "../../ui/charged";
import { FunctionLink } from "../../ui/function-link";
import { Empty, ErrorBox, Loading, Panel, Stat } from "../../ui/parts";
import { setQuery } from "../../ui/router";
import type { PageProps } from "..";

const RANGES = { "7": "last 7 days", "30": "last 30 days", "90": "last 90 days", "365": "last 365 days" };
const GROUPS: Readonly<Record<Group, string>> = { function: "by function", key: "by API key", day: "by day" };
const DAY_MS = 86_400_000;

export default function UsagePage({ query }: PageProps) {
  const range = (query["days"] ?? "7") in RANGES ? (query["days"] ?? "7") : "7";
  const group = (query["group"] ?? "function") in GROUPS ? ((query["group"] ?? "function") as Group) : "function";
  const isFolded = query["all"] !== "yes";
  const today = dayOf(Date.now());
  const since = dayOf(Date.now() - (Number(range) - 1) * DAY_MS);
  const { data, problem } = useResource<{ usage: readonly UsageRow[] }>(`/v1/usage?since=${since}&until=${today}`);
  return (
    <div class="page">
      <div class="title">
        <h1>Usage</h1>
        <span class="actions">
          <label>
            <span class="hidden">Time</span>
            <select value={range} onChange={(event) => setQuery({ days: event.currentTarget.value })}>
              {Object.entries(RANGES).map(([days, text]) => (
                <option key={days} value={days}>
                  {text}
                </option>
              ))}
            </select>
          </label>
          <label>
            <span class="hidden">Order</span>
            <select value={group} onChange={(event) => setQuery({ group: event.currentTarget.value })}>
              {Object.entries(GROUPS).map(([each, text]) => (
                <option key={each} value={each}>
                  {text}
                </option>
              ))}
            </select>
          </label>
        </span>
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? problem ? null : <Loading what="the usage" /> : <Use rows={data.usage} group={group} isFolded={isFolded} since={since} today={today} />}
    </div>
  );
}

interface UseProps {
  readonly rows: readonly UsageRow[];
  readonly group: Group;
  readonly isFolded: boolean;
  readonly since: string;
  readonly today: string;
}

function Use({ rows, group, isFolded, since, today }: UseProps) {
  const charged = useCharged(group === "function" ? rows.map((row) => row.function) : [], isFolded);
  const grouped = rows.map((row) => ({ ...row, function: charged(row.function) }));
  const all = totals(rows, "day").reduce(
    (sum, each) => ({ calls: sum.calls + each.calls, failed: sum.failed + each.failed, run_s: sum.run_s + each.run_s, gpu_s: sum.gpu_s + each.gpu_s, joules: each.joules === null ? sum.joules : (sum.joules ?? 0) + each.joules }),
    { calls: 0, failed: 0, run_s: 0, gpu_s: 0, joules: null as number | null },
  );
  return (
    <>
      <dl class="stats">
        <Stat label="Attempts" value={number(all.calls)} note={`${number(all.failed)} failed`} />
        <Stat label="Run time" value={duration(all.run_s)} />
        <Stat label="GPU time" value={duration(all.gpu_s)} note="charged" />
        <Stat label="Energy" value={energy(all.joules)} note="of calls that were measured" />
      </dl>
      <Days rows={rows} since={since} today={today} />
      <Panel title={`Usage ${GROUPS[group]}`} note="days are UTC days; runners store their usage every 10 s" actions={group === "function" ? <ListAll isFolded={isFolded} /> : null}>
        <Table totals={totals(grouped, group)} group={group} />
      </Panel>
    </>
  );
}

function Days({ rows, since, today }: { rows: readonly UsageRow[]; since: string; today: string }) {
  const data = useMemo(() => {
    const byDay = new Map(totals(rows, "day").map((each) => [each.name, each]));
    const days = daysFrom(since, today);
    return days.map((day) => ({ day, values: [byDay.get(day)?.run_s ?? 0, byDay.get(day)?.gpu_s ?? 0] }));
  }, [rows, since, today]);
  return (
    <Panel title="Time per day">
      <div class="body">
        <DayBars label="Run time and GPU time of each day" names={["run time", "GPU time"]} days={data} format={duration} />
      </div>
    </Panel>
  );
}

function Table({ totals: rows, group }: { totals: readonly Total[]; group: Group }) {
  return (
    <BoundedTable
      label="Usage"
      rows={rows}
      empty={<Empty title="No call has ended in this time, or its usage is not stored yet." />}
      head={
        <>
          <th>{group === "function" ? "Function" : group === "key" ? "API key" : "Day"}</th>
          <th class="number">Attempts</th>
          <th class="number">Failed</th>
          <th class="number">Run time</th>
          <th class="number">GPU time</th>
          <th class="number">Energy</th>
        </>
      }
    >
      {(row) => (
        <tr key={row.name}>
          <td class={group === "function" ? "" : "mono"}>{group === "function" ? <FunctionLink name={row.name} /> : row.name}</td>
          <td class="number">{number(row.calls)}</td>
          <td class="number">
            {number(row.failed)} ({percent(row.calls ? row.failed / row.calls : 0)})
          </td>
          <td class="number">{duration(row.run_s)}</td>
          <td class="number">{duration(row.gpu_s)}</td>
          <td class="number">{energy(row.joules)}</td>
        </tr>
      )}
    </BoundedTable>
  );
}
