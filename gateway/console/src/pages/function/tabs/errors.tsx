import { useMemo } from "preact/hooks";
import { useLines } from "../../../api/lines";
import { failureIn, grouped, type FailureGroup } from "../../../core/errors";
import { number, plural, visible } from "../../../core/format";
import { Ago, Badge, Empty, ErrorBox, Loading, Panel } from "../../../ui/parts";
import { Link } from "../../../ui/router";

export function ErrorsTab({ name }: { name: string }) {
  const log = useLines(`/v1/functions/${name}/logs?tail=3000&follow=true`);
  const groups = useMemo(() => grouped(log.lines.map(failureIn).filter((each) => each !== null)), [log.lines]);
  if (log.problem) {
    return <ErrorBox error={log.problem} />;
  }
  if (!log.isLive) {
    return <Loading what="the errors" />;
  }
  return (
    <Panel title="Errors by type" note={`in the last ${plural(log.lines.length, "line")} of the log`}>
      {groups.length === 0 ? <Empty title="No call has failed in this part of the log." /> : groups.map((group, index) => <Group key={group.type} group={group} isOpen={index === 0} />)}
    </Panel>
  );
}

function Group({ group, isOpen }: { group: FailureGroup; isOpen: boolean }) {
  const { last } = group;
  return (
    <details class="group" open={isOpen}>
      <summary>
        <Badge tone="bad">{number(group.count)}</Badge> <strong>{visible(group.type)}</strong>{" "}
        <span>{visible(last.message)}</span>{" "}
        <span class="dim">
          last <Ago at={last.at} />
        </span>
      </summary>
      <div class="body">
        <p>
          Last failure{last.call ? " in call " : ""}
          {last.call ? <Link to={`/calls/${last.call}`}>{last.call}</Link> : null}, first of this type here{" "}
          <Ago at={group.first_at} />.
        </p>
        <pre class="box">{visible(last.traceback.trimEnd())}</pre>
      </div>
    </details>
  );
}
