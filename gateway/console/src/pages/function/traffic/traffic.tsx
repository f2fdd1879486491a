import { useMay } from "../../../api/principal";
import { usePolled } from "../../../api/poll";
import { send } from "../../../api/request";
import { useResource } from "../../../api/resource";
import type { Revision } from "../../../api/views";
import { duration, number, percent, visible } from "../../../core/format";
import { ruleText } from "../../../core/traffic";
import { Ask } from "../../../ui/change/ask";
import { Ago, Badge, Empty, ErrorBox, Loading, Panel } from "../../../ui/parts";
import { Scroll } from "../../../ui/scroll";
import { WorkerStates } from "../../../ui/workers";
import { Mirrored } from "./mirrored";
import { SetSplit } from "./set";
import type { RevisionTraffic, Traffic } from "./views";

const MOST_REVISIONS = 10; // of a split

export function TrafficTab({ name, version }: { name: string; version: number }) {
  const { data: traffic, problem, reload } = usePolled<Traffic>(`/v1/functions/${name}/traffic`, 2_000);
  const { data: known } = useResource<{ revisions: readonly Revision[] }>(`/v1/functions/${name}/revisions`, version);
  const mayDeploy = useMay("deploy", name);
  if (traffic === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the traffic" />;
  }
  const isSplit = traffic.set_at !== null;
  const others = (known?.revisions ?? []).filter((each) => each.state === "ready" && each.number !== traffic.serving).map((each) => each.number);
  const revisions = [...new Set([traffic.serving, ...traffic.revisions.map((each) => each.revision), ...others.reverse()])].slice(0, MOST_REVISIONS).sort((a, b) => b - a);
  return (
    <>
      {problem ? <ErrorBox error={problem} /> : null}
      <Panel
        title="Traffic"
        note={isSplit ? <>split <Ago at={traffic.set_at} /></> : `revision ${traffic.serving} gets all calls`}
        actions={
          mayDeploy ? (
            <>
              {revisions.length > 1 ? <SetSplit name={name} traffic={traffic} revisions={revisions} onChange={reload} /> : null}
              {isSplit ? <End name={name} traffic={traffic} onChange={reload} /> : null}
            </>
          ) : null
        }
      >
        {isSplit ? (
          <>
            <Shares traffic={traffic} />
            <Revisions name={name} traffic={traffic} mayDeploy={mayDeploy} onChange={reload} />
          </>
        ) : (
          <Empty title={`Revision ${traffic.serving} gets all calls.`}>
            {revisions.length > 1 ? "Split the calls to try another revision with a part of them." : <pre>gpufn deploy app.py --traffic 10%</pre>}
          </Empty>
        )}
      </Panel>
      <Rules traffic={traffic} />
      {traffic.mirror !== null || traffic.compared !== null ? <Mirrored name={name} traffic={traffic} mayDeploy={mayDeploy} /> : null}
    </>
  );
}

function End({ name, traffic, onChange }: { name: string; traffic: Traffic; onChange: () => void }) {
  return (
    <Ask
      label="End the split"
      title="End the split?"
      isDangerous
      onSubmit={async () => {
        await send(`/v1/functions/${name}/traffic`, { method: "DELETE" });
        onChange();
      }}
    >
      <p>
        All calls of <strong>{name}</strong> go to revision {traffic.serving}, which serves. Running calls finish where they are.
      </p>
    </Ask>
  );
}

/** The weights as parts of one bar. */
function Shares({ traffic }: { traffic: Traffic }) {
  const weights = Object.entries(traffic.weights).filter(([, weight]) => weight > 0);
  return (
    <div class="body">
      <div class="shares" role="img" aria-label={weights.map(([revision, weight]) => `revision ${revision}: ${weight} %`).join(", ")}>
        {weights.map(([revision, weight], index) => (
          <span key={revision} class={`share share-${index % 4}`} style={{ flexGrow: weight }} title={`revision ${revision}: ${weight} %`}>
            {weight >= 20 ? `${revision} · ${weight} %` : ""}
          </span>
        ))}
      </div>
    </div>
  );
}

interface RevisionsProps {
  readonly name: string;
  readonly traffic: Traffic;
  readonly mayDeploy: boolean;
  readonly onChange: () => void;
}

function Revisions({ name, traffic, mayDeploy, onChange }: RevisionsProps) {
  return (
    <Scroll label="Revisions with calls">
      <table>
        <thead>
          <tr>
            <th class="number">Revision</th>
            <th class="number">Weight</th>
            <th>Workers</th>
            <th class="number">Calls</th>
            <th class="number">Failed</th>
            <th class="number">p50</th>
            <th class="number">p99</th>
            <th class="number">Failed, last {duration(traffic.window_s)}</th>
            <th>Note</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {traffic.revisions.map((each) => (
            <tr key={each.revision}>
              <td class="number">{each.revision}</td>
              <td class="number">{number(traffic.weights[String(each.revision)] ?? 0)} %</td>
              <td>
                <WorkerStates counts={presentOf(each.workers)} />
              </td>
              <td class="number">{number(each.total.calls)}</td>
              <td class="number">{number(each.total.errors)}</td>
              <td class="number">{duration(each.total.p50_s)}</td>
              <td class="number">{duration(each.total.p99_s)}</td>
              <td class="number">{each.recent.calls ? percent(each.recent.errors / each.recent.calls) : "–"}</td>
              <td class="reason">
                <Note each={each} traffic={traffic} />
              </td>
              <td>{mayDeploy && each.revision !== traffic.serving ? <Promote name={name} revision={each.revision} onChange={onChange} /> : null}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

function presentOf(workers: RevisionTraffic["workers"]): RevisionTraffic["workers"] {
  return Object.fromEntries(Object.entries(workers).filter(([, count]) => count > 0));
}

function Note({ each, traffic }: { each: RevisionTraffic; traffic: Traffic }) {
  return (
    <>
      {each.revision === traffic.serving ? <Badge tone="ok">serves</Badge> : null} {each.revision === traffic.mirror?.revision ? <Badge tone="info">gets copies</Badge> : null}
      {each.start_error ? <span class="block">does not start: {visible(each.start_error.message.split("\n")[0] ?? "")}</span> : null}
    </>
  );
}

function Promote({ name, revision, onChange }: { name: string; revision: number; onChange: () => void }) {
  return (
    <span class="row-actions">
      <Ask
        label="Promote"
        of={`revision ${revision}`}
        title={`Send all calls to revision ${revision}?`}
        action="Promote"
        onSubmit={async () => {
          await send(`/v1/functions/${name}/traffic`, { method: "PUT", json: { weights: { [revision]: 100 } } });
          onChange();
        }}
      >
        <p>
          Revision {revision} of <strong>{name}</strong> becomes active, and the split ends once it serves. Running calls finish where they are.
        </p>
      </Ask>
    </span>
  );
}

function Rules({ traffic }: { traffic: Traffic }) {
  const { headers, return_if: rules, returned } = traffic;
  if (headers.length === 0 && rules.length === 0 && returned === null) {
    return null;
  }
  return (
    <Panel title="Rules">
      <dl class="pairs body">
        {headers.length ? (
          <>
            <dt>Headers</dt>
            <dd class="mono">{headers.map((rule) => visible(ruleText(rule))).join(", ")}</dd>
          </>
        ) : null}
        {rules.length ? (
          <>
            <dt>Undone if</dt>
            <dd>
              <code>{rules.join(" or ")}</code>, in {duration(traffic.window_s)} with at least {number(traffic.min_calls)} calls
            </dd>
          </>
        ) : null}
        {returned !== null ? (
          <>
            <dt>Undone</dt>
            <dd>
              <Ago at={returned.at} />, from {returned.weights}: revision {returned.revision}, {visible(returned.reason)}
            </dd>
          </>
        ) : null}
      </dl>
    </Panel>
  );
}
