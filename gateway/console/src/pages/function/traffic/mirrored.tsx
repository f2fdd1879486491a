/** The comparison of calls with their copies. */

import { usePolled } from "../../../api/poll";
import { duration, number, visible } from "../../../core/format";
import { BoundedTable } from "../../../ui/lists/bounded-table";
import { Ago, Badge, Empty, ErrorBox, Panel, Stat } from "../../../ui/parts";
import type { Difference, Traffic } from "./views";

export function Mirrored({ name, traffic, mayDeploy }: { name: string; traffic: Traffic; mayDeploy: boolean }) {
  const { mirror, compared } = traffic;
  const note = mirror === null ? "of an earlier setting" : `copies of ${number(mirror.percent)} % of the calls go to revision ${mirror.revision}`;
  return (
    <Panel title="Copies of calls" note={note}>
      {compared === null ? (
        <Empty title="No copy has ended yet.">Only calls whose client waits are copied.</Empty>
      ) : (
        <dl class="stats inner">
          <Stat label="Equal" value={number(compared.equal)} />
          <Stat label="Different" value={number(compared.different)} />
          <Stat label="Copy failed" value={number(compared.failed)} />
          <Stat label="Skipped" value={number(compared.skipped)} />
          <Stat label="p50 of the calls" value={duration(compared.p50_s)} />
          <Stat label="p50 of the copies" value={duration(compared.copy_p50_s)} />
        </dl>
      )}
      {mayDeploy && compared !== null ? <Differences name={name} /> : null}
    </Panel>
  );
}

/** The API shows parts of results only with the scope deploy. */
function Differences({ name }: { name: string }) {
  const { data, problem } = usePolled<{ differences: readonly Difference[] }>(`/v1/functions/${name}/differences`, 3_000);
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : null;
  }
  return (
    <BoundedTable
      label="Differences"
      rows={[...data.differences].reverse()}
      empty={<Empty title="No copy ended otherwise." />}
      head={
        <>
          <th>When</th>
          <th>Call</th>
          <th>Result</th>
          <th>At</th>
          <th>Answer</th>
          <th>Copy</th>
        </>
      }
    >
      {(each) => (
        <tr key={each.invocation}>
          <td>
            <Ago at={each.at} />
          </td>
          <td class="mono">{each.invocation}</td>
          <td>
            <Badge tone={each.comparison === "failed" ? "bad" : "warn"}>{each.comparison}</Badge>
          </td>
          <td class="mono">{visible(each.path)}</td>
          <td class="mono reason">{visible(each.answer)}</td>
          <td class="mono reason">{visible(each.copy)}</td>
        </tr>
      )}
    </BoundedTable>
  );
}
