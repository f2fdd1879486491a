import { useState } from "preact/hooks";
import { useCall } from "../../api/call";
import { useLines } from "../../api/lines";
import { useMay } from "../../api/principal";
import { post, send } from "../../api/request";
import type { Call } from "../../api/views";
import { bytes, duration, number, percent, time, visible } from "../../core/format";
import { timelineOf } from "../../core/timeline";
import { CallState } from "../../ui/calls-table";
import { Dialog } from "../../ui/dialog";
import { LogView } from "../../ui/log-view";
import { Badge, ErrorBox, Loading, Panel, useNow } from "../../ui/parts";
import { go, Link } from "../../ui/router";
import { TimelineView } from "../../ui/timeline";
import type { PageProps } from "..";
import { Attempts } from "./attempts";
import { Nested } from "./nested";
import { Result } from "./result";

export default function CallPage({ parameters }: PageProps) {
  const id = parameters["id"] ?? "";
  const [version, setVersion] = useState(0);
  const { call, problem } = useCall(id, version);
  if (call === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the call" />;
  }
  return (
    <div class="page">
      <Title call={call} onChange={() => setVersion(version + 1)} />
      <Facts call={call} />
      <Life call={call} />
      <Nested call={call} />
      {call.error ? <Failure call={call} /> : null}
      <Attempts call={call} />
      <Result call={call} />
      <Log call={call} />
    </div>
  );
}

function baseOf(call: Call): string {
  return call.function.split(".")[0] ?? "";
}

function Title({ call, onChange }: { call: Call; onChange: () => void }) {
  const [asks, setAsks] = useState<"cancel" | "replay" | null>(null);
  const mayInvoke = useMay("invoke", baseOf(call));
  const isDead = call.state === "failed" || call.state === "timed_out" || call.state === "expired";
  return (
    <>
      <div class="title">
        <h1 class="mono">{call.id}</h1>
        <CallState state={call.state} />
        <span>
          of <Link to={`/functions/${baseOf(call)}`}>{call.function}</Link> revision {call.revision}
        </span>
        <span class="actions">
          {mayInvoke && call.ended_at === null ? (
            <button type="button" class="danger" onClick={() => setAsks("cancel")}>
              Cancel the call
            </button>
          ) : null}
          {mayInvoke && isDead ? (
            <button type="button" onClick={() => setAsks("replay")}>
              Replay
            </button>
          ) : null}
        </span>
      </div>
      {asks === "cancel" ? (
        <Dialog
          title="Cancel this call?"
          action="Cancel the call"
          isDangerous
          onClose={() => setAsks(null)}
          onSubmit={async () => {
            await send(`/v1/invocations/${call.id}`, { method: "DELETE" });
            onChange();
          }}
        >
          <p>A call that runs is interrupted. Its effects stay.</p>
        </Dialog>
      ) : null}
      {asks === "replay" ? (
        <Dialog
          title="Replay this call?"
          action="Replay"
          onClose={() => setAsks(null)}
          onSubmit={async () => {
            const replayed = await post<{ id: string }>(`/v1/dlq/${baseOf(call)}/${call.id}/replay`);
            go(`/calls/${replayed.id}`);
          }}
        >
          <p>It is submitted again, with the same arguments, to the revision that serves now.</p>
        </Dialog>
      ) : null}
    </>
  );
}

function Facts({ call }: { call: Call }) {
  return (
    <Panel title="Call">
      <dl class="pairs body">
        <dt>Submitted</dt>
        <dd>{time(call.submitted_at)}</dd>
        {call.ended_at === null ? null : (
          <>
            <dt>Ended</dt>
            <dd>
              {time(call.ended_at)}, after {duration(call.ended_at - call.submitted_at)}
            </dd>
          </>
        )}
        {call.waiting ? (
          <>
            <dt>It waits</dt>
            <dd>
              {visible(call.waiting.detail)} <code class="dim">{call.waiting.reason}</code>
              {call.place === null ? "" : `, place ${number(call.place)} in the queue`}
              {call.eta_s === null ? "" : `, starts in about ${duration(call.eta_s)}`}
            </dd>
          </>
        ) : null}
        {call.worker ? (
          <>
            <dt>Worker</dt>
            <dd class="mono">{call.worker}</dd>
          </>
        ) : null}
        {call.priority === "normal" ? null : (
          <>
            <dt>Priority</dt>
            <dd>{call.priority}</dd>
          </>
        )}
        {call.gpu_s ? (
          <>
            <dt>GPU time</dt>
            <dd>{duration(call.gpu_s)}</dd>
          </>
        ) : null}
        {call.key === "platform" ? null : (
          <>
            <dt>API key</dt>
            <dd class="mono">
              <Link to="/calls" query={{ key: call.key }}>
                {call.key}
              </Link>
            </dd>
          </>
        )}
        {call.parent ? (
          <>
            <dt>Called by</dt>
            <dd class="mono">
              <Link to={`/calls/${call.parent}`}>{call.parent}</Link>
            </dd>
          </>
        ) : null}
        {call.trace ? (
          <>
            <dt>Trace</dt>
            <dd class="mono">{call.trace}</dd>
          </>
        ) : null}
        {call.state === "succeeded" ? (
          <>
            <dt>Result</dt>
            <dd>{bytes(call.size)}</dd>
          </>
        ) : null}
        <Progress progress={call.progress} />
      </dl>
    </Panel>
  );
}

function Progress({ progress }: { progress: Call["progress"] }) {
  if (typeof progress !== "object" || progress === null || Array.isArray(progress)) {
    return null;
  }
  const fields = progress as Readonly<Record<string, unknown>>;
  const done = typeof fields["fraction"] === "number" ? percent(fields["fraction"]) : "";
  const text = typeof fields["message"] === "string" ? visible(fields["message"]) : "";
  return (
    <>
      <dt>Progress</dt>
      <dd>{[done, text].filter(Boolean).join(", ") || visible(JSON.stringify(progress))}</dd>
    </>
  );
}

function Life({ call }: { call: Call }) {
  const now = useNow(call.ended_at === null ? 500 : 3_600_000);
  return (
    <Panel title="Timeline" note={call.ended_at === null ? "goes on" : undefined}>
      <div class="body">
        <TimelineView timeline={timelineOf(call, now)} />
      </div>
    </Panel>
  );
}

function Failure({ call }: { call: Call }) {
  const error = call.error;
  return error === null ? null : (
    <Panel title="Error" note={<Badge tone="bad">{error.code}</Badge>}>
      <div class="body">
        <p>
          {error.error_type ? <strong>{visible(error.error_type)}: </strong> : null}
          {visible(error.message)}
        </p>
        {error.traceback ? <pre class="box">{visible(error.traceback.trimEnd())}</pre> : null}
      </div>
    </Panel>
  );
}

function Log({ call }: { call: Call }) {
  const isOver = call.ended_at !== null;
  const log = useLines(`/v1/functions/${baseOf(call)}/logs?call=${call.id}&follow=true`);
  return (
    <Panel title="Log of this call" note={isOver ? "as far as the log is kept" : "live"}>
      <LogView log={log} withCalls={false} empty={isOver ? "It has written nothing, or its lines are no longer kept." : "It has written nothing yet."} />
    </Panel>
  );
}
