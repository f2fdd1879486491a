import { useState } from "preact/hooks";
import { useMay } from "../../../api/principal";
import { post } from "../../../api/request";
import { useResource } from "../../../api/resource";
import type { Revision, RevisionDetails } from "../../../api/views";
import { visible } from "../../../core/format";
import { optionChanges } from "../../../core/specdiff";
import { Dialog } from "../../../ui/dialog";
import { Ago, Badge, Empty, ErrorBox, Loading, Panel } from "../../../ui/parts";
import { Scroll } from "../../../ui/scroll";

export function RevisionsTab({ name, version }: { name: string; version: number }) {
  const { data, problem } = useResource<{ revisions: readonly Revision[] }>(`/v1/functions/${name}/revisions`, version);
  const [chosen, setChosen] = useState<number | null>(null);
  const [target, setTarget] = useState<number | null>(null);
  const mayDeploy = useMay("deploy", name);
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the revisions" />;
  }
  const revisions = [...data.revisions].reverse();
  const shown = chosen ?? revisions[0]?.number ?? 0;
  const before = revisions.find((each) => each.number < shown);
  return (
    <>
      <Panel title="Revisions" note="newest first">
        <Scroll label="Revisions">
          <table>
            <thead>
              <tr>
                <th class="number">Revision</th>
                <th>State</th>
                <th>Deployed</th>
                <th>Signed by</th>
                <th>Code</th>
                <th />
              </tr>
            </thead>
            <tbody>
              {revisions.map((each) => (
                <tr key={each.number} aria-selected={each.number === shown}>
                  <td class="number">{each.number}</td>
                  <td>
                    {each.serving ? <Badge tone="ok">serving</Badge> : null} {each.active && !each.serving ? <Badge tone="info">active</Badge> : null}{" "}
                    {each.state === "ready" ? null : <Badge tone={each.state === "failed" ? "bad" : "quiet"}>{each.state}</Badge>}
                  </td>
                  <td>
                    <Ago at={each.created_at} />
                  </td>
                  <td>{each.signed_by || <span class="dim">nobody</span>}</td>
                  <td class="mono dim">{each.code.slice(0, 12) || "–"}</td>
                  <td>
                    <span class="toolbar">
                      <button type="button" onClick={() => setChosen(each.number)} disabled={each.number === shown}>
                        Changes
                      </button>
                      {mayDeploy && !each.active && each.state !== "failed" && each.state !== "building" ? (
                        <button type="button" onClick={() => setTarget(each.number)}>
                          Roll back
                        </button>
                      ) : null}
                    </span>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      </Panel>
      <Changes name={name} number={shown} before={before?.number ?? null} />
      {target !== null ? (
        <Dialog
          title={`Roll back to revision ${target}?`}
          action="Roll back"
          onClose={() => setTarget(null)}
          onSubmit={async () => {
            await post(`/v1/functions/${name}/rollback`, { revision: target });
          }}
        >
          <p>
            Calls of <strong>{name}</strong> go to revision {target} as soon as one of its workers is ready. Running calls
            finish where they are.
          </p>
        </Dialog>
      ) : null}
    </>
  );
}

function Changes({ name, number, before }: { name: string; number: number; before: number | null }) {
  const path = `/v1/functions/${name}/revisions`;
  const after = useResource<RevisionDetails>(number ? `${path}/${number}` : "");
  const earlier = useResource<RevisionDetails>(before === null ? "" : `${path}/${before}`);
  if (before === null) {
    return (
      <Panel title={`Changes of revision ${number}`}>
        <Empty title="There is no earlier revision to compare with." />
      </Panel>
    );
  }
  if (after.data === null || earlier.data === null) {
    const problem = after.problem ?? earlier.problem;
    return problem ? <ErrorBox error={problem} /> : <Loading what="the options" />;
  }
  const changes = optionChanges(earlier.data.spec, after.data.spec);
  const isSameCode = earlier.data.code === after.data.code;
  return (
    <Panel title={`Options: revision ${before} → ${number}`} note={isSameCode ? "the code is the same" : "the code differs too"}>
      {changes.length === 0 ? (
        <Empty title="The options are the same." />
      ) : (
        <Scroll label="Changed options">
          <table>
            <thead>
              <tr>
                <th>Option</th>
                <th>Revision {before}</th>
                <th>Revision {number}</th>
              </tr>
            </thead>
            <tbody>
              {changes.map((change) => (
                <tr key={change.option}>
                  <td class="mono">{change.option}</td>
                  <td class="mono wrap removed">{visible(change.before) || "–"}</td>
                  <td class="mono wrap added">{visible(change.after) || "–"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </Panel>
  );
}
