import type { Team, TeamLimits } from "../../api/records";
import { send } from "../../api/request";
import { linesOf, numberOf, numbersOf, textOf } from "../../core/form";
import { Ask } from "../../ui/change/ask";
import { Choice, Field, TextField } from "../../ui/change/field";

const LIMITS: Readonly<Record<keyof TeamLimits, string>> = {
  workers: "Workers at the same time",
  gpus: "GPUs at the same time",
  queued: "Submitted calls that have not ended",
  run_s: "Run time per UTC day, in seconds",
  gpu_s: "GPU seconds per UTC day",
  stored_bytes: "Stored bytes",
  functions: "Functions",
};
const TIERS = { process: "process", sandbox: "sandbox", container: "container" };

/** Create a team, or change one. All of its settings are replaced. */
export function SetTeam({ team, onChange }: { team?: Team; onChange: () => void }) {
  async function set(form: FormData): Promise<void> {
    const name = team?.name ?? textOf(form, "name");
    await send(`/v1/teams/${encodeURIComponent(name)}`, {
      method: "PUT",
      json: {
        owns: linesOf(form, "owns"),
        weight: numberOf(form, "weight") ?? 1,
        isolation: textOf(form, "isolation"),
        callers: linesOf(form, "callers"),
        trust_domains: linesOf(form, "trust_domains"),
        limits: numbersOf(form, Object.keys(LIMITS)),
      },
    });
    onChange();
  }
  return (
    <Ask label={team ? "Edit" : "Create a team"} {...(team ? { of: team.name } : {})} title={team ? `Team ${team.name}` : "Create a team"} action={team ? "Set" : "Create"} onSubmit={set}>
      {team ? null : <Field label="Name" name="name" required pattern="[a-z0-9\-]+" />}
      <TextField label="Owns" name="owns" required value={team?.owns.join("\n") ?? ""} placeholder="prod/search/*" note="A pattern in each line: ENV/APP/*, */APP/*, ENV/* or a full name." />
      <Field label="Weight" name="weight" isNumber value={team?.weight ?? 1} note="Its part of the GPU seconds, relative to other teams." />
      <Choice label="Weakest isolation of its functions" name="isolation" options={TIERS} value={team?.isolation ?? "process"} />
      <TextField label="Callers" name="callers" rows={2} value={team?.callers?.join("\n") ?? ""} note="Patterns of functions of others whose code may call its functions." />
      <TextField label="Trust domains" name="trust_domains" rows={2} value={team?.trust_domains?.join("\n") ?? ""} note="Domains in which its functions share GPUs with those of teams that also have them." />
      <details>
        <summary>Limits</summary>
        <p class="dim">An empty field means no limit, or 1,000 functions.</p>
        {Object.entries(LIMITS).map(([name, label]) => (
          <Field key={name} label={label} name={name} isNumber value={team?.limits?.[name as keyof TeamLimits] ?? ""} />
        ))}
      </details>
    </Ask>
  );
}
