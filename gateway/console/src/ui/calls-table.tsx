/** A list of submitted calls: newest first, read again every few seconds, new and older ones on request. */

import { useCalls } from "../api/calls";
import type { Call } from "../api/views";
import { bytes, duration, number, visible } from "../core/format";
import { Waiting } from "./lists/waiting";
import { Ago, Badge, Empty, ErrorBox, Loading, type Tone } from "./parts";
import { Link } from "./router";
import { Scroll } from "./scroll";

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
  readonly apiKey?: string;
  /** Unix seconds: only calls that changed last at this time or earlier. */
  readonly until?: number | null;
  readonly withFunction?: boolean;
}

export function CallsTable({ functionName, state, apiKey = "", until = null, withFunction = true }: CallsTableProps) {
  const { calls, waiting, hasMore, onWaiting, problem, isSearching, isLast, onMore } = useCalls({ function: functionName, state, key: apiKey, until });
  if (calls === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the calls" />;
  }
  if (calls.length === 0 && isLast) {
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
      {until === null ? <Waiting what="call" count={waiting} hasMore={hasMore} onShow={onWaiting} /> : null}
      {calls.length ? <Table calls={calls} withFunction={withFunction} /> : null}
      <div class="body">
        {isSearching ? (
          <span class="dim" role="status">
            Searches older calls …
          </span>
        ) : isLast ? (
          <span class="dim">These are all calls that are kept.</span>
        ) : (
          <span>
            <button type="button" onClick={onMore}>
              Show older calls
            </button>
          </span>
        )}
      </div>
    </>
  );
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
