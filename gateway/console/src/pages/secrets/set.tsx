import type { Secret } from "../../api/records";
import { send } from "../../api/request";
import { textOf } from "../../core/form";
import { Ask } from "../../ui/change/ask";
import { Field, TextField } from "../../ui/change/field";

/** Set a secret, or change its value. */
export function SetSecret({ secret, onChange }: { secret?: Secret; onChange: () => void }) {
  async function set(form: FormData): Promise<void> {
    const name = secret?.name ?? textOf(form, "name");
    const scope = secret?.scope ?? scopeOf(textOf(form, "env"), textOf(form, "app"));
    const value = form.get("value");
    await send(`/v1/secrets/${encodeURIComponent(name)}?scope=${encodeURIComponent(scope)}`, { method: "PUT", json: { value: typeof value === "string" ? value : "" } });
    onChange();
  }
  const of = secret ? `${secret.name} of ${secret.scope}` : "";
  return (
    <Ask label={secret ? "Change" : "Set a secret"} {...(of ? { of } : {})} title={secret ? `New value of ${secret.name}` : "Set a secret"} action="Set" onSubmit={set}>
      {secret ? null : (
        <>
          <Field label="Name" name="name" required pattern="[A-Za-z_][A-Za-z0-9_]*" placeholder="HF_TOKEN" note="The environment variable." />
          <Field label="Environment" name="env" note="Empty: for every function." />
          <Field label="App" name="app" note="Only with an environment. Empty: for every app of it." />
        </>
      )}
      <TextField label="Value" name="value" required note="Functions that get it are given new workers with it; no call is lost." />
    </Ask>
  );
}

function scopeOf(env: string, app: string): string {
  if (app && !env) {
    throw new Error("An app needs its environment.");
  }
  return env ? `${env}${app ? `/${app}` : ""}/*` : "*";
}
