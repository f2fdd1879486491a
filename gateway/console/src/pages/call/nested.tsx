import { useMemo } from "preact/hooks";
import { useResource } from "../../api/resource";
import type { Call, TraceView, TracedSpan } from "../../api/views";
import { duration, percent, plural, visible } from "../../core/format";
import { below, criticalPath, nested, shares, type PathSpan } from "../../core/path/critical";
import { CriticalPath } from "../../ui/critical-path";
import { Panel } from "../../ui/parts";
import { Link } from "../../ui/router";

const MOST_CHILDREN = 200;
const MOST_SHARES = 3;

interface NestedSpan extends PathSpan {
  /** The id of the call, if it is one. */
  readonly call: string;
  readonly isFailed: boolean;
}

/** The calls that an ended call has made, and the path through them that decided when it ended. A trace has all of them; without one the records
 * have those that were submitted. */
export function Nested({ call }: { call: Call }) {
  const isOver = call.ended_at !== null;
  const trace = useResource<TraceView>(isOver ? `/v1/traces/${call.id}` : "");
  const children = useResource<{ calls: readonly Call[] }>(isOver && trace.problem ? `/v1/calls?parent=${call.id}&since=${call.submitted_at}&limit=${MOST_CHILDREN}` : "");
  const spans = useMemo(() => {
    const traced = trace.data ? fromTrace(trace.data.spans, call.id) : [];
    return traced.length ? traced : fromRecords(call, children.data?.calls ?? []);
  }, [trace.data, children.data, call]);
  const root = spans.find((each) => each.call === call.id);
  const others = spans.filter((each) => each.call && each.call !== call.id).length;
  if (!root || others === 0) {
    return null;
  }
  const parts = criticalPath(spans, root);
  const names = new Map(spans.map((each) => [each.id, each]));
  const longest = shares(parts).slice(0, MOST_SHARES);
  return (
    <Panel title="Nested calls and the critical path" note={trace.data ? plural(others, "nested call") : `${plural(others, "submitted call")}; a trace has those that it waited for too`}>
      <div class="body">
        <p>
          Most of the time on the path:{" "}
          {longest.map(({ id, seconds }, index) => (
            <span key={id}>
              {index ? ", " : ""}
              <strong>{titleOf(names.get(id), names)}</strong> {duration(seconds)} ({percent(seconds / (root.end - root.start))})
            </span>
          ))}
          .
        </p>
        <CriticalPath
          root={root}
          rows={nested(spans)}
          parts={parts}
          isFailed={(span) => span.isFailed}
          nameOf={(span) => (span.call && span.call !== call.id && !trace.data ? <Link to={`/calls/${span.call}`}>{visible(span.name)}</Link> : visible(span.name))}
        />
      </div>
    </Panel>
  );
}

/** "run of embed": the phases of all calls have the same names. */
function titleOf(span: NestedSpan | undefined, spans: ReadonlyMap<string, NestedSpan>): string {
  if (span === undefined) {
    return "";
  }
  const caller = span.call ? undefined : spans.get(span.parent ?? "");
  return visible(caller ? `${span.name} of ${caller.name}` : span.name);
}

const CALLS = ["server", "consumer"];

function fromTrace(spans: readonly TracedSpan[], id: string): NestedSpan[] {
  const isCall = (span: TracedSpan): boolean => CALLS.includes(span.kind);
  const root = spans.find((each) => isCall(each) && each.attributes["faas.invocation_id"] === id);
  const found = root ? below(spans, root.id) : [];
  return found
    .filter((each) => each.kind !== "producer")
    .map((each) => ({ ...each, call: isCall(each) ? String(each.attributes["faas.invocation_id"] ?? "") : "", isFailed: each.error !== null }));
}

function fromRecords(call: Call, children: readonly Call[]): NestedSpan[] {
  return [call, ...children].flatMap((each) =>
    each.ended_at === null
      ? []
      : [{ id: each.id, parent: each.id === call.id ? null : call.id, name: each.function, call: each.id, start: each.submitted_at, end: each.ended_at, isFailed: each.error !== null }],
  );
}
