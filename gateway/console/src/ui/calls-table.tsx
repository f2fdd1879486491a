/** A list of submitted calls: newest first, read again every few seconds, older ones on request. */

import { useEffect, useState } from "preact/hooks";
import { get } from "../api/request";
import type { Call } from "../api/views";
import { bytes, duration, number, visible } from "../core/format";
import { Ago, Badge, Empty, ErrorBox, Loading, type Tone } from "./parts";
import { Link } from "./router";
import { Scroll } from "./scroll";

const PART = 50;
const LEAST_WAIT_MS = 3_000;
const WAIT_PER_COST = 10; // a search that takes a second runs every ten seconds

export const STATES = ["queued", "running", "succeeded", "failed", "cancelled", "timed_out", "expired"] as const;

const TONES: Readonly<Record<string, Tone>> = {
  queued: "quiet",
  running: "info",
  succeeded: "ok",
  failed: "bad",
  cancelled: "warn",
  timed_out: "bad",
  expired: "bad",
};

export function CallState({ state }: { state: string }) {
  return <Badge tone={TONES[state] ?? "quiet"}>{state.replace("_", " ")}</Badge>;
}

interface CallsTableProps {
  readonly functionName: string;
  readonly state: string;
  /** Unix seconds: only calls that changed last at this time or earlier. */
  readonly until?: number | null;
  readonly withFunction?: boolean;
}

export function CallsTable({ functionName, state, until = null, withFunction = true }: CallsTableProps) {
  const [calls, setCalls] = useState<readonly Call[] | null>(null);
  const [older, setOlder] = useState<readonly Call[]>([]);
  const [problem, setProblem] = useState<unknown>(null);
  const [isLast, setLast] = useState(false);
  const key = `${functionName} ${state} ${until ?? ""}`;
  useEffect(() => {
    setCalls(null);
    setOlder([]);
    setLast(false);
    const abort = new AbortController();
    void poll(address(functionName, state, until), until === null, abort.signal, setCalls, setProblem);
    return () => abort.abort();
  }, [key]);
  async function more(): Promise<void> {
    const known = [...(calls ?? []), ...older];
    const oldest = Math.min(...known.map(changedAt));
    const found = await get<{ calls: Call[] }>(address(functionName, state, oldest)).catch(setProblem);
    if (found) {
      const ids = new Set(known.map((each) => each.id));
      const added = found.calls.filter((each) => !ids.has(each.id));
      setOlder([...older, ...added]);
      setLast(added.length === 0);
    }
  }
  if (calls === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the calls" />;
  }
  const shown = merged(calls, older);
  if (shown.length === 0) {
    return (
      <Empty title="No submitted call is here.">
        <p>
          Calls whose caller waits leave no record. <code>gpufn submit NAME ARGUMENTS</code>, <code>.spawn()</code> and{" "}
          <code>.map()</code> make calls that appear here.
        </p>
      </Empty>
    );
  }
  return (
    <>
      {problem ? <ErrorBox error={problem} /> : null}
      <Table calls={shown} withFunction={withFunction} />
      <div class="body">
        {isLast ? (
          <span class="dim">These are all calls that are kept.</span>
        ) : (
          <span>
            <button type="button" onClick={() => void more()}>
              Show older calls
            </button>
          </span>
        )}
      </div>
    </>
  );
}

function address(functionName: string, state: string, until: number | null): string {
  const query = new URLSearchParams({ limit: String(PART) });
  for (const [name, value] of Object.entries({ function: functionName, state, until: until === null ? "" : String(until) })) {
    if (value) {
      query.set(name, value);
    }
  }
  return `/v1/calls?${query.toString()}`;
}

function changedAt(call: Call): number {
  return call.ended_at ?? call.attempts[call.attempts.length - 1]?.ended_at ?? call.submitted_at;
}

function merged(newest: readonly Call[], older: readonly Call[]): readonly Call[] {
  const ids = new Set(newest.map((each) => each.id));
  return [...newest, ...older.filter((each) => !ids.has(each.id))];
}

async function poll(
  path: string,
  repeats: boolean,
  signal: AbortSignal,
  show: (calls: readonly Call[]) => void,
  fail: (problem: unknown) => void,
): Promise<void> {
  while (!signal.aborted) {
    const since = performance.now();
    try {
      if (!document.hidden) {
        show((await get<{ calls: Call[] }>(path, signal)).calls);
        fail(null);
      }
    } catch (problem) {
      if (signal.aborted) {
        return;
      }
      fail(problem);
    }
    if (!repeats) {
      return;
    }
    const wait = Math.max(LEAST_WAIT_MS, WAIT_PER_COST * (performance.now() - since));
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}

function Table({ calls, withFunction }: { calls: readonly Call[]; withFunction: boolean }) {
  return (
    <Scroll label="Calls">
      <table>
        <thead>
          <tr>
            <th>Call</th>
            {withFunction ? <th>Function</th> : null}
            <th>State</th>
            <th>Submitted</th>
            <th class="number">Queued</th>
            <th class="number">Run time</th>
            <th class="number">Attempts</th>
            <th class="number">Result</th>
            <th>Error, or why it waits</th>
          </tr>
        </thead>
        <tbody>
          {calls.map((call) => (
            <tr key={call.id}>
              <td class="mono">
                <Link to={`/calls/${call.id}`}>{call.id}</Link>
              </td>
              {withFunction ? (
                <td>
                  <Link to={`/functions/${call.function.split(".")[0] ?? ""}`}>{call.function}</Link>
                </td>
              ) : null}
              <td>
                <CallState state={call.state} />
              </td>
              <td>
                <Ago at={call.submitted_at} />
              </td>
              <td class="number">{duration(call.queue_s)}</td>
              <td class="number">{duration(call.run_s)}</td>
              <td class="number">{number(call.attempt)}</td>
              <td class="number">{call.state === "succeeded" ? bytes(call.size) : "–"}</td>
              <td class="wide">{visible(reasonOf(call))}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

function reasonOf(call: Call): string {
  if (call.error) {
    return `${call.error.error_type ?? call.error.code}: ${call.error.message}`;
  }
  return call.waiting?.detail ?? "";
}
