import { useMay } from "../../api/principal";
import { usePolled } from "../../api/poll";
import type { Team, TeamLimits } from "../../api/records";
import { bytes, duration, number } from "../../core/format";
import { Delete } from "../../ui/change/delete";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { SetTeam } from "./set";

export default function TeamsPage() {
  const { data, problem, reload } = usePolled<{ teams: readonly Team[] }>("/v1/teams", 5_000);
  const isAdmin = useMay("admin");
  return (
    <div class="page">
      <div class="title">
        <h1>Teams</h1>
        <span class="dim">who owns which functions</span>
        {isAdmin && data ? (
          <span class="actions">
            <SetTeam onChange={reload} />
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the teams" />
      ) : (
        <Panel title="Teams" note="what they use now, or have used today (UTC), and their limits">
          <Table teams={data.teams} isAdmin={isAdmin} onChange={reload} />
        </Panel>
      )}
    </div>
  );
}

const COLUMNS: Readonly<Record<keyof TeamLimits, { readonly label: string; readonly show: (value: number) => string }>> = {
  workers: { label: "Workers", show: number },
  gpus: { label: "GPUs", show: number },
  queued: { label: "Queued", show: number },
  run_s: { label: "Run time today", show: duration },
  gpu_s: { label: "GPU time today", show: duration },
  stored_bytes: { label: "Stored", show: bytes },
  functions: { label: "Functions", show: number },
};

function Table({ teams, isAdmin, onChange }: { teams: readonly Team[]; isAdmin: boolean; onChange: () => void }) {
  return (
    <BoundedTable
      label="Teams"
      rows={teams}
      empty={<Empty title="There is no team: functions belong to nobody, and share the GPUs as they come." />}
      head={
        <>
          <th>Team</th>
          <th>Owns</th>
          {Object.values(COLUMNS).map((each) => (
            <th key={each.label}>{each.label}</th>
          ))}
          <th />
        </>
      }
    >
      {(team) => (
        <tr key={team.name}>
          <td>
            {team.name}
            <span class="dim block">
              weight {number(team.weight ?? 1)}, {team.isolation ?? "process"}
            </span>
          </td>
          <td class="mono reason">{team.owns.join(", ")}</td>
          {(Object.keys(COLUMNS) as (keyof TeamLimits)[]).map((name) => (
            <td key={name}>
              <Use team={team} name={name} />
            </td>
          ))}
          <td>
            {isAdmin ? (
              <span class="row-actions">
                <SetTeam team={team} onChange={onChange} />
                <Delete path={`/v1/teams/${team.name}`} label="Remove" of={team.name} title={`Remove the team ${team.name}?`} onDone={onChange}>
                  <p>Its functions stay and belong to no team. Its limits no longer hold.</p>
                </Delete>
              </span>
            ) : null}
          </td>
        </tr>
      )}
    </BoundedTable>
  );
}

function Use({ team, name }: { team: Team; name: keyof TeamLimits }) {
  const used = team.use[name];
  const limit = team.limits?.[name];
  const { label, show } = COLUMNS[name];
  const borrowed = name === "gpus" && team.use.borrowed_gpus ? `, ${number(team.use.borrowed_gpus)} borrowed` : "";
  if (limit === undefined) {
    return (
      <>
        {show(used)}
        {borrowed}
      </>
    );
  }
  const share = limit ? used / limit : 1;
  return (
    <>
      <span class="block">
        {show(used)} of {show(limit)}
        {borrowed}
      </span>
      <Bar label={`${label} of ${team.name}`} share={share} tone={share >= 1 ? "bad" : share > 0.8 ? "warn" : "accent"} />
    </>
  );
}
