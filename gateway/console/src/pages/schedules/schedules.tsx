import { usePolled } from "../../api/poll";
import { useMay } from "../../api/principal";
import type { Schedule } from "../../api/records";
import { post } from "../../api/request";
import { time, visible } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Delete } from "../../ui/change/delete";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { FunctionLink } from "../../ui/function-link";
import { FunctionFilter } from "../../ui/lists/functions-filter";
import { Badge, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { go, Link } from "../../ui/router";
import type { PageProps } from "..";
import { AddSchedule } from "./add";

export default function SchedulesPage({ query }: PageProps) {
  const name = query["function"] ?? "";
  const { data, problem, reload } = usePolled<{ schedules: readonly Schedule[] }>(`/v1/schedules${name ? `?function=${encodeURIComponent(name)}` : ""}`, 5_000);
  const mayInvoke = useMay("invoke");
  return (
    <div class="page">
      <div class="title">
        <h1>Schedules</h1>
        {mayInvoke ? (
          <span class="actions">
            <AddSchedule functionName={name} onChange={reload} />
          </span>
        ) : null}
      </div>
      <FunctionFilter name={name} />
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the schedules" />
      ) : (
        <Panel title="Schedules" note="times of the next call are in your time zone">
          <Table schedules={data.schedules} onChange={reload} />
        </Panel>
      )}
    </div>
  );
}

function Table({ schedules, onChange }: { schedules: readonly Schedule[]; onChange: () => void }) {
  return (
    <BoundedTable
      label="Schedules"
      rows={schedules}
      empty={
        <Empty title="No schedule is here.">
          Declare one with <code>schedule=</code>, or add one: it calls a function at the times of a cron line, or once.
        </Empty>
      }
      head={
        <>
          <th>Schedule</th>
          <th>Function</th>
          <th>When</th>
          <th>Next call</th>
          <th>Last call</th>
          <th />
        </>
      }
    >
      {(each) => (
        <tr key={each.id}>
          <td>
            {each.id} {each.declared ? <Badge tone="quiet">declared</Badge> : null}
          </td>
          <td>
            <FunctionLink name={each.method ? `${each.function}.${each.method}` : each.function} />
            <span class="dim mono block cut" title={visible(JSON.stringify(each.arguments))}>
              {visible(JSON.stringify(each.arguments))}
            </span>
          </td>
          <td>
            {each.cron === null ? "once" : <code>{each.cron}</code>} {each.cron === null ? null : <span class="dim">{each.timezone}</span>}
            {each.cron !== null && each.missed !== "once" ? <span class="dim">, missed: {each.missed}</span> : null}
          </td>
          <td>{each.paused ? <Badge tone="warn">paused</Badge> : time(each.next_at)}</td>
          <td class="mono">{each.invocation ? <Link to={`/calls/${each.invocation}`}>…{each.invocation.slice(-8)}</Link> : <span class="dim">none yet</span>}</td>
          <td>
            <Actions schedule={each} onChange={onChange} />
          </td>
        </tr>
      )}
    </BoundedTable>
  );
}

function Actions({ schedule, onChange }: { schedule: Schedule; onChange: () => void }) {
  const mayInvoke = useMay("invoke", schedule.function);
  if (!mayInvoke) {
    return null;
  }
  const path = `/v1/schedules/${schedule.id}`;
  return (
    <span class="row-actions">
      <Ask
        label="Run now"
        of={schedule.id}
        title={`Call ${schedule.function} now?`}
        onSubmit={async () => {
          const call = await post<{ id: string }>(`${path}/run`);
          go(`/calls/${call.id}`);
        }}
      >
        <p>One call with the arguments of the schedule is submitted. The schedule does not change.</p>
      </Ask>
      {schedule.paused ? (
        <Ask
          label="Resume"
          of={schedule.id}
          title={`Resume ${schedule.id}?`}
          onSubmit={async () => {
            await post(`${path}/resume`);
            onChange();
          }}
        >
          <p>It calls {schedule.function} again from its next time on.</p>
        </Ask>
      ) : (
        <Ask
          label="Pause"
          of={schedule.id}
          title={`Pause ${schedule.id}?`}
          onSubmit={async () => {
            await post(`${path}/pause`);
            onChange();
          }}
        >
          <p>Calls that are due during the pause are skipped.</p>
        </Ask>
      )}
      {schedule.declared ? null : (
        <Delete path={path} label="Remove" of={schedule.id} title={`Remove ${schedule.id}?`} onDone={onChange}>
          <p>It makes no further calls. Calls that it has submitted stay.</p>
        </Delete>
      )}
    </span>
  );
}
