import { useOutcomes } from "../../api/outcomes";
import { usePolled } from "../../api/poll";
import { useMay } from "../../api/principal";
import type { MapStatus } from "../../api/records";
import { send } from "../../api/request";
import { number, percent, time, visible } from "../../core/format";
import { endedOf } from "../../core/data/outcomes";
import { Ask } from "../../ui/change/ask";
import { CallState } from "../../ui/calls-table";
import { FunctionLink } from "../../ui/function-link";
import { Lanes } from "./lanes";
import { MapState } from "../maps/state";
import { Empty, ErrorBox, Loading, Panel, Stat } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";

export default function MapPage({ parameters }: PageProps) {
  const id = parameters["id"] ?? "";
  const { data: map, problem, reload } = usePolled<MapStatus>(`/v1/maps/${encodeURIComponent(id)}`, 1_000);
  const mayInvoke = useMay("invoke", map?.function.split(".")[0] ?? "");
  if (map === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the map" />;
  }
  const isOver = map.state === "ended" || map.state === "cancelled";
  return (
    <div class="page">
      <div class="title">
        <h1 class="mono">{map.id}</h1>
        <MapState state={map.state} />
        <span>
          of <FunctionLink name={map.function} /> revision {map.revision}
        </span>
        {mayInvoke && !isOver ? (
          <span class="actions">
            <Ask
              label="Cancel the map"
              title="Cancel this map?"
              isDangerous
              onSubmit={async () => {
                await send(`/v1/maps/${map.id}`, { method: "DELETE" });
                reload();
              }}
            >
              <p>Items that have not ended are cancelled. It accepts no further items.</p>
            </Ask>
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      <Panel title="Progress" note={`submitted ${time(map.submitted_at)}`}>
        <div class="body">
          <Bar label="Progress" share={map.accepted ? map.ended / map.accepted : 0} tone={map.state === "ended" ? "ok" : "accent"} />
          <p>
            {number(map.ended)} of {number(map.accepted)} items have ended ({percent(map.accepted ? map.ended / map.accepted : 0)}).
            {map.failed ? ` ${number(map.failed)} of them failed.` : ""}
            {map.state === "open" ? " Its client may send more." : ""}
          </p>
        </div>
      </Panel>
      <Lanes id={map.id} isOver={isOver} />
      {mayInvoke ? <Items map={map} /> : <NoItems />}
    </div>
  );
}

function NoItems() {
  return (
    <Panel title="Items that failed">
      <Empty title="Outcomes contain results, so they need a key with the scope invoke for this function." />
    </Panel>
  );
}

function Items({ map }: { map: MapStatus }) {
  const { outcomes, isCut, problem } = useOutcomes(map.id);
  const failed = endedOf(outcomes) - (outcomes.counts["succeeded"] ?? 0);
  return (
    <>
      <dl class="stats">
        {["succeeded", "failed", "timed_out", "expired", "cancelled"].map((state) => (
          <Stat key={state} label={state.replace("_", " ")} value={number(outcomes.counts[state] ?? 0)} />
        ))}
      </dl>
      {isCut ? <p class="dim">The results are large, so only the first {number(endedOf(outcomes))} outcomes were read.</p> : null}
      {problem ? <ErrorBox error={problem} /> : null}
      <Panel title="Items that failed" note={failed > outcomes.failed.length ? `the first ${outcomes.failed.length} of ${number(failed)}` : number(failed)}>
        {outcomes.failed.length === 0 ? (
          <Empty title="No item has failed." />
        ) : (
          <Scroll label="Items that failed">
            <table>
              <thead>
                <tr>
                  <th class="number">Item</th>
                  <th>State</th>
                  <th>Error</th>
                </tr>
              </thead>
              <tbody>
                {outcomes.failed.map((each) => (
                  <tr key={each.index}>
                    <td class="number">
                      <Link to={`/calls/${map.id}-${each.index}`}>{each.index}</Link>
                    </td>
                    <td>
                      <CallState state={each.state} />
                    </td>
                    <td class="wide">{visible(each.error ? `${each.error.error_type ?? each.error.code}: ${each.error.detail}` : "")}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Scroll>
        )}
      </Panel>
    </>
  );
}
