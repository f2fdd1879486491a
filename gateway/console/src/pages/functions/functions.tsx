import { useState } from "preact/hooks";
import { useLive } from "../../api/live";
import type { FunctionList, FunctionRow } from "../../api/views";
import { duration, number, percent, plural } from "../../core/format";
import { splitText } from "../../core/traffic";
import { memo } from "../../ui/memo";
import { Badge, Empty, ErrorBox, LiveMark, Loading, Panel } from "../../ui/parts";
import { Link, setQuery } from "../../ui/router";
import { VirtualRows } from "../../ui/virtual-rows";
import { WorkerStates } from "../../ui/workers";
import type { PageProps } from "..";

const SHOWS = { all: "All", findings: "With findings", called: "Called in the last minute", running: "With workers" };
const SORTS = { name: "Function", calls: "Attempts/s", errors: "Failed", p99: "p99", queued: "Queued", workers: "Workers" };
const PART = 50; // rows that the gateway sends at a time

export default function FunctionsPage({ query }: PageProps) {
  const [offset, setOffset] = useState(0);
  const search = query["search"] ?? "";
  const show = query["show"] ?? "all";
  const sort = query["sort"] ?? "name";
  const parameters = new URLSearchParams({ search, show, sort, offset: String(offset), limit: String(2 * PART) });
  const { data, connection, problem } = useLive<FunctionList>(`/v1/console/functions?${parameters.toString()}`);
  function change(changes: Record<string, string>): void {
    setOffset(0);
    setQuery(changes);
  }
  return (
    <div class="page">
      <div class="title">
        <h1>Functions</h1>
        <LiveMark connection={connection} />
      </div>
      <div class="toolbar">
        <input
          type="search"
          aria-label="Search functions"
          placeholder="Search by name, app or environment ( / )"
          value={search}
          onInput={(event) => change({ search: event.currentTarget.value })}
        />
        <label>
          <span class="hidden">Show</span>
          <select value={show} onChange={(event) => change({ show: event.currentTarget.value })}>
            {Object.entries(SHOWS).map(([value, text]) => (
              <option key={value} value={value}>
                {text}
              </option>
            ))}
          </select>
        </label>
        {data ? <span class="dim">{countOf(data)}</span> : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the functions" />
      ) : (
        <List list={data} sort={sort} onSort={(next) => change({ sort: next })} onOffset={setOffset} />
      )}
    </div>
  );
}

function countOf(list: FunctionList): string {
  const all = plural(list.all, "function");
  return list.matching === list.all ? all : `${number(list.matching)} of ${all}`;
}

interface ListProps {
  readonly list: FunctionList;
  readonly sort: string;
  readonly onSort: (sort: string) => void;
  readonly onOffset: (offset: number) => void;
}

function List({ list, sort, onSort, onOffset }: ListProps) {
  if (list.matching === 0) {
    return (
      <Panel title="Functions">
        {list.all === 0 ? (
          <Empty title="No function is deployed.">
            <pre>gpufn deploy app.py</pre>
          </Empty>
        ) : (
          <Empty title="No function matches.">
            <button type="button" onClick={() => setQuery({ search: "", show: "" })}>
              Show all functions
            </button>
          </Empty>
        )}
      </Panel>
    );
  }
  return (
    <section class="panel" aria-label="Functions">
      <VirtualRows
        total={list.matching}
        offset={list.offset}
        count={list.order.length}
        step={PART}
        onOffset={onOffset}
        head={<Head sort={sort} onSort={onSort} />}
      >
        {list.order.map((name) => {
          const row = list.rows[name];
          return row ? <Row key={name} name={name} row={row} /> : null;
        })}
      </VirtualRows>
    </section>
  );
}

function Head({ sort, onSort }: { sort: string; onSort: (sort: string) => void }) {
  return (
    <tr>
      {Object.entries(SORTS).map(([key, label]) => (
        <th
          key={key}
          class={key === "name" || key === "workers" ? "" : "number"}
          aria-sort={sort === key ? (key === "name" ? "ascending" : "descending") : undefined}
        >
          <button type="button" onClick={() => onSort(key)}>
            {label}
            {sort === key ? (key === "name" ? " ↑" : " ↓") : ""}
          </button>
        </th>
      ))}
      <th>GPU</th>
      <th class="number">Revision</th>
    </tr>
  );
}

const Row = memo(function Row({ name, row }: { name: string; row: FunctionRow }) {
  return (
    <tr>
      <td class="name">
        <Link to={`/functions/${name}`}>{name}</Link> {row.web ? <Badge tone="quiet">web</Badge> : null}{" "}
        {row.finding ? (
          <Badge tone={row.finding.severity === "critical" ? "bad" : "warn"}>
            <span title={row.finding.title}>{row.finding.severity}</span>
          </Badge>
        ) : null}
      </td>
      <td class="number">{number(row.calls_per_s)}</td>
      <td class="number">{percent(row.error_share)}</td>
      <td class="number">{duration(row.p99_s)}</td>
      <td class="number">{number(row.queued)}</td>
      <td>
        <WorkerStates counts={row.workers} />
      </td>
      <td>{row.gpu || <span class="dim">CPU</span>}</td>
      <td class="number">{row.split ? splitText(row.split) : row.serving}</td>
    </tr>
  );
});
