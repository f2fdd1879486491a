import { useEffect, useState } from "preact/hooks";
import { usePolled } from "../../api/poll";
import type { PlatformEvent } from "../../api/records";
import { get } from "../../api/request";
import { clock, visible } from "../../core/format";
import { byDay, KINDS, subjectOf, toneOf } from "../../core/operate/time-line";
import { FunctionLink } from "../../ui/function-link";
import { Badge, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { Link, setQuery } from "../../ui/router";
import type { PageProps } from "..";

interface Events {
  readonly events: readonly PlatformEvent[];
  readonly next: number | null;
}

const PART = 100;

export default function EventsPage({ query }: PageProps) {
  const subject = query["subject"] ?? "";
  const kind = query["kind"] ?? "";
  const path = addressOf(subject, kind);
  const { data, problem } = usePolled<Events>(path, 5_000);
  return (
    <div class="page">
      <div class="title">
        <h1>Events</h1>
        <span class="dim">deploys, scale decisions, faults, quarantines, nodes</span>
      </div>
      <Filter subject={subject} kind={kind} />
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? problem ? null : <Loading what="the events" /> : <TimeLine key={path} newest={data} path={path} />}
    </div>
  );
}

function addressOf(subject: string, kind: string): string {
  const parameters = new URLSearchParams({ limit: String(PART) });
  if (subject) {
    parameters.set("subject", /^(function|node|gpu):/.test(subject) ? subject : `function:${subject}`);
  }
  if (kind) {
    parameters.set("kind", kind);
  }
  return `/v1/events?${parameters.toString()}`;
}

function Filter({ subject, kind }: { subject: string; kind: string }) {
  const [text, setText] = useState(subject);
  useEffect(() => setText(subject), [subject]);
  return (
    <form
      class="toolbar"
      role="search"
      onSubmit={(event) => {
        event.preventDefault();
        setQuery({ subject: text.trim() });
      }}
    >
      <input type="search" aria-label="Function, node:NAME or gpu:UUID" placeholder="Function, node:NAME or gpu:UUID, then Enter" value={text} onInput={(event) => setText(event.currentTarget.value)} />
      <label>
        <span class="hidden">Kind</span>
        <select value={kind} onChange={(event) => setQuery({ kind: event.currentTarget.value })}>
          <option value="">All kinds</option>
          {Object.entries(KINDS).map(([key, name]) => (
            <option key={key} value={key}>
              {name}
            </option>
          ))}
        </select>
      </label>
      {subject || kind ? (
        <button type="button" onClick={() => setQuery({ subject: "", kind: "" })}>
          Show all
        </button>
      ) : null}
    </form>
  );
}

function TimeLine({ newest, path }: { newest: Events; path: string }) {
  const [older, setOlder] = useState<readonly PlatformEvent[]>([]);
  const [next, setNext] = useState<number | null>(newest.next);
  const [problem, setProblem] = useState<unknown>(null);
  async function more(): Promise<void> {
    try {
      const found = await get<Events>(`${path}&before=${next ?? 0}`);
      setOlder([...older, ...found.events]);
      setNext(found.next);
    } catch (error) {
      setProblem(error);
    }
  }
  const known = new Set(newest.events.map((each) => each.id));
  const events = [...newest.events, ...older.filter((each) => !known.has(each.id))];
  if (events.length === 0) {
    return (
      <Panel title="Events">
        <Empty title="Nothing has happened.">Events are kept as long as the history.</Empty>
      </Panel>
    );
  }
  return (
    <>
      {byDay(events).map(([day, ofDay]) => (
        <Panel key={day} title={day} note={`${ofDay.length} shown`}>
          <ol class="events">
            {ofDay.map((event) => (
              <li key={event.id} class={toneOf(event.kind)}>
                <time dateTime={new Date(event.at * 1000).toISOString()} class="mono">
                  {clock(event.at).slice(0, 8)}
                </time>
                <span>
                  <Badge tone={toneOf(event.kind)}>{KINDS[event.kind] ?? event.kind}</Badge>
                </span>
                <span>
                  <Subject event={event} />
                  <span class="text">{visible(event.text)}</span>
                </span>
              </li>
            ))}
          </ol>
        </Panel>
      ))}
      {problem ? <ErrorBox error={problem} /> : null}
      {next === null ? (
        <p class="dim">These are all events that are kept.</p>
      ) : (
        <p>
          <button type="button" onClick={() => void more()}>
            Show older events
          </button>
        </p>
      )}
    </>
  );
}

function Subject({ event }: { event: PlatformEvent }) {
  const { kind, name } = subjectOf(event.subject);
  if (kind === "function") {
    return (
      <strong>
        <FunctionLink name={name} />{" "}
      </strong>
    );
  }
  const node = kind === "node" ? name : (event.node ?? "");
  return (
    <strong>
      {node ? (
        <Link to={`/nodes/${node}`} query={kind === "gpu" ? { gpu: name } : {}}>
          {kind === "gpu" ? `GPU ${name.slice(0, 12)} of ${node}` : `node ${name}`}
        </Link>
      ) : (
        visible(event.subject)
      )}{" "}
    </strong>
  );
}
