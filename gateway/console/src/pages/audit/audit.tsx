import { useState } from "preact/hooks";
import type { AuditPage } from "../../api/audit";
import { get } from "../../api/request";
import { useResource } from "../../api/resource";
import type { AuditRecord } from "../../core/operate/audit";
import { number, plural, time, visible } from "../../core/format";
import { Badge, Empty, ErrorBox, Loading, Panel, type Tone } from "../../ui/parts";
import { setQuery } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";
import { Verify } from "./verify";

const PART = 100;

export default function AuditLogPage({ query }: PageProps) {
  const search = query["search"] ?? "";
  const { data, problem, reload } = useResource<AuditPage>(`/v1/audit?limit=${PART}`);
  return (
    <div class="page">
      <div class="title">
        <h1>Audit log</h1>
        <span class="dim">who did what, from where, with which result</span>
        <span class="actions">
          <button type="button" onClick={reload}>
            Read again
          </button>
        </span>
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? problem ? null : <Loading what="the audit log" /> : <Log key={data.head?.seq} newest={data} search={search} />}
      {data ? <Verify /> : null}
    </div>
  );
}

function Log({ newest, search }: { newest: AuditPage; search: string }) {
  const [older, setOlder] = useState<readonly AuditRecord[]>([]);
  const [problem, setProblem] = useState<unknown>(null);
  const records = [...newest.records].reverse().concat(older);
  const oldest = records[records.length - 1]?.seq ?? 0;
  async function more(): Promise<void> {
    try {
      const after = Math.max(0, oldest - 1 - PART);
      const found = await get<AuditPage>(`/v1/audit?after=${after}&limit=${Math.max(1, oldest - 1 - after)}`);
      setOlder([...older, ...[...found.records].reverse().filter((each) => each.seq < oldest)]);
    } catch (error) {
      setProblem(error);
    }
  }
  const shown = records.filter((each) => isFound(each, search));
  return (
    <Panel title="Records" note={newest.head ? `newest first; ${plural(newest.head.seq, "record")} until now` : undefined}>
      <div class="body">
        <input
          type="search"
          aria-label="Search in the records that are shown"
          placeholder="Key, action, object or address"
          value={search}
          onInput={(event) => setQuery({ search: event.currentTarget.value })}
        />
      </div>
      {shown.length === 0 ? <Empty title={records.length ? `None of the newest ${number(records.length)} records matches.` : "No record is kept."} /> : <Table records={shown} />}
      {problem ? <ErrorBox error={problem} /> : null}
      <div class="body">
        {oldest > 1 ? (
          <span>
            <button type="button" onClick={() => void more()}>
              Show older records
            </button>
          </span>
        ) : (
          <span class="dim">These are all records.</span>
        )}
      </div>
    </Panel>
  );
}

function isFound(record: AuditRecord, search: string): boolean {
  const text = [record.principal, record.label, record.address, record.action, record.object, record.code, record.request_id, ...Object.values(record.details ?? {})].join(" ").toLowerCase();
  return search
    .toLowerCase()
    .split(/\s+/)
    .every((word) => text.includes(word));
}

function Table({ records }: { records: readonly AuditRecord[] }) {
  return (
    <Scroll label="Records">
      <table>
        <thead>
          <tr>
            <th class="number">Record</th>
            <th>Time</th>
            <th>Who</th>
            <th>From</th>
            <th>Action</th>
            <th>Object</th>
            <th>Result</th>
          </tr>
        </thead>
        <tbody>
          {records.map((record) => (
            <tr key={record.seq}>
              <td class="number">{record.seq}</td>
              <td>{time(record.at)}</td>
              <td title={record.principal}>{visible(record.label || record.principal || "nobody")}</td>
              <td class="mono">{visible(record.address ?? "")}</td>
              <td class="mono">{visible(record.action)}</td>
              <td class="wide">
                {visible(shortened(record.object ?? ""))}
                <span class="dim mono block cut" title={detailsOf(record)}>
                  {detailsOf(record)}
                </span>
              </td>
              <td>
                <Badge tone={toneOf(record.status)}>{record.status}</Badge> {record.code ? <code>{record.code}</code> : null}
                {(record.count ?? 1) > 1 ? ` ${number(record.count)} times` : ""}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

/** A SHA-256 by its first characters. */
function shortened(text: string): string {
  return text.replace(/[0-9a-f]{64}/g, (digest) => `${digest.slice(0, 12)}…`);
}

function detailsOf(record: AuditRecord): string {
  const details = Object.entries(record.details ?? {}).filter(([, value]) => value !== "");
  return visible(shortened(details.map(([name, value]) => `${name}=${value}`).join(" ")));
}

function toneOf(status: number): Tone {
  return status >= 500 ? "bad" : status >= 400 ? "warn" : "ok";
}
