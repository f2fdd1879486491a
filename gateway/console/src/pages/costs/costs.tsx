import { useMemo } from "preact/hooks";
import { useResource } from "../../api/resource";
import { duration, energy, money, number, percent, plural } from "../../core/format";
import { barsOf, folded, GROUPS, ordered, PARTS, sumOf, type Cost, type Costs, type Group } from "../../core/operate/costs";
import { dayOf, daysFrom } from "../../core/operate/usage";
import { DayBars } from "../../ui/day-bars";
import { ListAll, useCharged } from "../../ui/charged";
import { Download } from "../../ui/download";
import { FunctionLink } from "../../ui/function-link";
import { useBounded } from "../../ui/lists/bounded";
import { Empty, ErrorBox, Loading, Panel, Stat } from "../../ui/parts";
import { setQuery } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";
import { Budgets } from "./budgets";

const RANGES = { "7": "last 7 days", "30": "last 30 days", "90": "last 90 days" };
const HEADINGS: Readonly<Record<Group, string>> = { function: "Function", app: "App", team: "Team", key: "API key", day: "Day" };
const PER = 1000; // attempts
const PART_NAMES: Readonly<Record<(typeof PARTS)[number], string>> = { idle: "idle", used: "used", cpu: "CPU", unused: "unused" };
const DAY_MS = 86_400_000;

export default function CostsPage({ query }: PageProps) {
  const range = (query["days"] ?? "7") in RANGES ? (query["days"] ?? "7") : "7";
  const group = (query["group"] ?? "function") in GROUPS ? ((query["group"] ?? "function") as Group) : "function";
  const isShared = query["shared"] === "yes";
  const isFolded = query["all"] !== "yes";
  const today = dayOf(Date.now());
  const since = dayOf(Date.now() - (Number(range) - 1) * DAY_MS);
  const parameters = `since=${since}&until=${today}&share_unused=${isShared}`;
  const days = useResource<Costs>(`/v1/costs?by=day&${parameters}`);
  const groups = useResource<Costs>(group === "day" ? "" : `/v1/costs?by=${group}&${parameters}`);
  const found = group === "day" ? days : groups;
  const problem = days.problem ?? groups.problem;
  return (
    <div class="page">
      <div class="title">
        <h1>Costs</h1>
        <span class="actions">
          <Select label="Time" name="days" value={range} options={RANGES} />
          <Select label="Order" name="group" value={group} options={GROUPS} />
          <Download path={`/v1/costs?format=focus&${parameters}`} name={`costs-${since}-${today}.csv`} label="Download CSV" of="in the columns of FOCUS, by day, team, app, function and key" />
        </span>
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {days.data === null ? problem ? null : <Loading what="the costs" /> : <Summary costs={days.data} since={since} today={today} />}
      {days.data?.budgets.length ? <Budgets budgets={days.data.budgets} currency={days.data.currency ?? ""} /> : null}
      {found.data === null ? null : <Groups costs={found.data} group={group} isShared={isShared} isFolded={isFolded} />}
    </div>
  );
}

interface SelectProps {
  readonly label: string;
  readonly name: string;
  readonly value: string;
  readonly options: Readonly<Record<string, string>>;
}

/** A choice that is part of the address. */
function Select({ label, name, value, options }: SelectProps) {
  return (
    <label>
      <span class="hidden">{label}</span>
      <select value={value} onChange={(event) => setQuery({ [name]: event.currentTarget.value })}>
        {Object.entries(options).map(([each, text]) => (
          <option key={each} value={each}>
            {text}
          </option>
        ))}
      </select>
    </label>
  );
}

function Summary({ costs, since, today }: { costs: Costs; since: string; today: string }) {
  const { currency } = costs;
  const sum = useMemo(() => sumOf(costs.costs), [costs]);
  const bars = useMemo(() => barsOf(daysFrom(since, today), costs.costs, currency !== null), [costs, since, today]);
  const shareOf = (part: number): string => (sum.total ? `${percent(part / sum.total)} of all` : "");
  return (
    <>
      {currency === null ? (
        <Panel title="There are no prices">
          <p class="body">
            <span>
              Times are shown instead of amounts. Give the gateway a file of prices: <code>GPUFN_PRICES=/etc/gpufn/prices.toml</code>.
            </span>
          </p>
        </Panel>
      ) : null}
      <dl class="stats">
        {currency === null ? null : <Stat label={`All, ${currency}`} value={money(sum.total)} note={sum.calls ? `${money((PER * sum.total) / sum.calls)} per ${number(PER)} attempts` : undefined} />}
        <Stat label="GPU time of calls" value={currency === null ? duration(sum.gpu_used_s) : money(sum.used)} note={currency === null ? "used" : shareOf(sum.used)} />
        <Stat label="GPUs held, idle" value={currency === null ? duration(sum.gpu_idle_s) : money(sum.idle)} note={currency === null ? "by workers without a call" : shareOf(sum.idle)} />
        <Stat label="Reserved cores" value={currency === null ? duration(sum.cpu_s) : money(sum.cpu)} note={currency === null ? "core time" : shareOf(sum.cpu)} />
        {currency === null ? null : <Stat label="Unused GPUs" value={money(sum.unused)} note={shareOf(sum.unused)} />}
        <Stat label="Energy" value={energy(sum.joules)} note="of calls that were measured" />
        <Stat label="CO2" value={sum.co2_g === null ? "–" : weight(sum.co2_g)} note={sum.co2_g === null ? "not known" : "of that energy"} />
      </dl>
      <Panel title={currency === null ? "GPU time per day" : `${currency} per day`} note="UTC days">
        <div class="body">
          <DayBars
            label={currency === null ? "Used and idle GPU time of each day" : "Costs of each day, by their parts"}
            names={currency === null ? ["idle", "used"] : PARTS.map((part) => PART_NAMES[part])}
            days={bars}
            format={currency === null ? duration : number}
            isStacked
          />
        </div>
      </Panel>
    </>
  );
}

interface GroupsProps {
  readonly costs: Costs;
  readonly group: Group;
  readonly isShared: boolean;
  readonly isFolded: boolean;
}

function Groups({ costs, group, isShared, isFolded }: GroupsProps) {
  const folds = group === "function" || group === "app" ? group : null;
  const charged = useCharged(folds === null ? [] : costs.costs.map((each) => each[folds] ?? ""), isFolded);
  const grouped = useMemo(() => (folds === null ? costs : { ...costs, costs: folded(costs.costs, folds, charged) }), [costs, folds, charged]);
  return (
    <Panel
      title={`Costs ${GROUPS[group]}`}
      note="held time is known for 30 days"
      actions={
        <>
          {folds === null ? null : <ListAll isFolded={isFolded} />}
          <label>
            <input type="checkbox" checked={isShared} onChange={(event) => setQuery({ shared: event.currentTarget.checked ? "yes" : "" })} /> divide unused GPUs among all
          </label>
        </>
      }
    >
      <Table costs={grouped} group={group} />
    </Panel>
  );
}

function Table({ costs, group }: { costs: Costs; group: Group }) {
  const rows = useMemo(() => ordered(costs.costs, group), [costs, group]);
  const { shown, more } = useBounded(rows);
  const hasPrices = costs.currency !== null;
  const hasCarbon = rows.some((row) => row.co2_g !== null);
  if (rows.length === 0) {
    return <Empty title="Nothing has run in this time, or its usage is not stored yet." />;
  }
  return (
    <>
      <Scroll label="Costs">
        <table>
          <thead>
            <tr>
              <th>{HEADINGS[group]}</th>
              <th class="number">Attempts</th>
              <th class="number">GPU used</th>
              <th class="number">GPU idle</th>
              {hasPrices ? (
                <>
                  <th class="number">Used</th>
                  <th class="number">Idle</th>
                  <th class="number">CPU</th>
                  <th class="number">Unused</th>
                  <th class="number">{costs.currency}</th>
                  <th class="number">Per {number(PER)}</th>
                </>
              ) : (
                <th class="number">Core time</th>
              )}
              <th class="number">Energy</th>
              {hasCarbon ? <th class="number">CO2</th> : null}
            </tr>
          </thead>
          <tbody>
            {shown.map((row) => (
              <tr key={row[group]}>
                <td class={group === "key" || group === "day" ? "mono" : ""}>
                  <Name row={row} group={group} />
                </td>
                <td class="number">{number(row.calls)}</td>
                <td class="number">{duration(row.gpu_used_s)}</td>
                <td class="number">{duration(row.gpu_idle_s)}</td>
                {hasPrices ? (
                  <>
                    <td class="number">{money(row.used)}</td>
                    <td class="number">{money(row.idle)}</td>
                    <td class="number">{money(row.cpu)}</td>
                    <td class="number">{money(row.unused)}</td>
                    <td class="number">
                      <strong>{money(row.total)}</strong>
                    </td>
                    <td class="number">{row.calls ? money((PER * row.total) / row.calls) : "–"}</td>
                  </>
                ) : (
                  <td class="number">{duration(row.cpu_s)}</td>
                )}
                <td class="number">{energy(row.joules)}</td>
                {hasCarbon ? <td class="number">{row.co2_g === null ? "–" : weight(row.co2_g)}</td> : null}
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      {more}
      {rows.length > shown.length ? <p class="body dim">{plural(rows.length, "row")} in all; the CSV has every one.</p> : null}
    </>
  );
}

function Name({ row, group }: { row: Cost; group: Group }) {
  const name = row[group] ?? "";
  if (!name) {
    return <span class="dim">{group === "team" && row.calls ? "no team" : "GPUs that no worker held"}</span>;
  }
  return group === "function" ? <FunctionLink name={name} /> : <>{name}</>;
}

function weight(grams: number): string {
  return grams < 1000 ? `${number(grams)} g` : `${number(grams / 1000)} kg`;
}
