import { post } from "../../api/request";
import { linesOf, secondsOf, textOf } from "../../core/form";
import { Ask } from "../../ui/change/ask";
import { Field, TextField } from "../../ui/change/field";
import { limitsIn, LimitFields } from "./limits";
import type { NewSecret } from "./shown";

export function CreateKey({ isFirst, onCreated }: { isFirst: boolean; onCreated: (secret: NewSecret) => void }) {
  async function create(form: FormData): Promise<void> {
    const life = textOf(form, "expires");
    const seconds = life ? secondsOf(life) : null;
    if (life && seconds === null) {
      throw new Error("The life of a key is a time such as 30d, 12h or 90min.");
    }
    const created = await post<{ id: string; key: string }>("/v1/keys", {
      label: textOf(form, "label"),
      scopes: linesOf(form, "scopes"),
      team: textOf(form, "team"),
      limits: limitsIn(form),
      ...(seconds === null ? {} : { expires_in_s: seconds }),
    });
    onCreated({ id: created.id, key: created.key, signsIn: isFirst });
  }
  return (
    <Ask label="Create a key" title="Create an API key" action="Create" onSubmit={create}>
      {isFirst ? (
        <p>
          This is the first key, so it needs the scope <code>admin</code> and cannot expire. From then on every request needs a key, from this
          machine too. This page signs in with it.
        </p>
      ) : null}
      <Field label="Purpose" name="label" placeholder="search-ci" />
      <TextField
        label="Scopes"
        name="scopes"
        required
        value={isFirst ? "admin" : ""}
        placeholder={"deploy:prod/search/*\ninvoke:prod/search/*"}
        note="One in a line: admin, read, deploy, exec, hi, pickle, invoke:P, read:P, deploy:P or exec:P for the functions that the pattern P names."
      />
      {isFirst ? null : <Field label="Team" name="team" note="Its scopes hold for the functions of the team. Empty: no team." />}
      {isFirst ? null : <Field label="Expires in" name="expires" placeholder="30d" note="30d, 12h or 90min. Empty: never." />}
      <details>
        <summary>Limits</summary>
        <LimitFields limits={{}} />
      </details>
    </Ask>
  );
}
