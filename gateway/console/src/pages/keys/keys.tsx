import { useContext, useState } from "preact/hooks";
import { PrincipalContext } from "../../api/principal";
import type { Key } from "../../api/records";
import { post, send, signOut } from "../../api/request";
import { useResource } from "../../api/resource";
import { secondsOf, textOf } from "../../core/form";
import { time, visible } from "../../core/format";
import { limitsText } from "../../core/operate/limits";
import { Ask } from "../../ui/change/ask";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { Field } from "../../ui/change/field";
import { Ago, Badge, Empty, ErrorBox, Loading, Panel, useNow } from "../../ui/parts";
import { CreateKey } from "./create";
import { limitsIn, LimitFields } from "./limits";
import { Shown, type NewSecret } from "./shown";

export default function KeysPage() {
  const { data, problem, reload } = useResource<{ keys: readonly Key[] }>("/v1/keys");
  const [secret, setSecret] = useState<NewSecret | null>(null);
  const own = useContext(PrincipalContext).id;
  return (
    <div class="page">
      <div class="title">
        <h1>API keys</h1>
        {data ? (
          <span class="actions">
            <CreateKey isFirst={data.keys.length === 0} onCreated={setSecret} />
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the keys" />
      ) : (
        <Panel title="Keys">
          <Table keys={data.keys} own={own} onChange={reload} onSecret={setSecret} />
        </Panel>
      )}
      {secret ? (
        <Shown
          secret={secret}
          onClose={() => {
            setSecret(null);
            reload();
          }}
        />
      ) : null}
    </div>
  );
}

interface TableProps {
  readonly keys: readonly Key[];
  readonly own: string;
  readonly onChange: () => void;
  readonly onSecret: (secret: NewSecret) => void;
}

function Table({ keys, own, onChange, onSecret }: TableProps) {
  const withTeams = keys.some((each) => each.team);
  const now = useNow(5_000);
  return (
    <BoundedTable
      label="Keys"
      rows={keys}
      empty={<Empty title="There is no key: the gateway serves this machine only, and everybody on it has every right." />}
      head={
        <>
          <th>Key</th>
          {withTeams ? <th>Team</th> : null}
          <th>Scopes</th>
          <th>Limits</th>
          <th>Created</th>
          <th>Last used</th>
          <th>Expires</th>
          <th />
        </>
      }
    >
      {(key) => (
        <tr key={key.id}>
          <td class="reason">
            {key.label ? visible(key.label) : <span class="dim">no label</span>} {key.id === own ? <Badge tone="info">yours</Badge> : null}
            <span class="dim mono block">{key.id}</span>
          </td>
          {withTeams ? <td>{key.team}</td> : null}
          <td class="mono reason">{key.scopes.join(", ")}</td>
          <td>{limitsText(key.limits)}</td>
          <td>
            <Ago at={key.created_at} />
          </td>
          <td>{key.last_used_at ? <Ago at={key.last_used_at} /> : <span class="dim">never</span>}</td>
          <td>
            {key.expires_at === null ? <span class="dim">never</span> : key.expires_at < now ? <Badge tone="bad">expired</Badge> : time(key.expires_at)}
            {key.replaced_until !== null && key.replaced_until > now ? <span class="dim block">old secret until {time(key.replaced_until)}</span> : null}
          </td>
          <td>
            <Actions of={key} own={own} onChange={onChange} onSecret={onSecret} />
          </td>
        </tr>
      )}
    </BoundedTable>
  );
}

interface ActionsProps {
  readonly of: Key;
  readonly own: string;
  readonly onChange: () => void;
  readonly onSecret: (secret: NewSecret) => void;
}

function Actions({ of: key, own, onChange, onSecret }: ActionsProps) {
  const name = key.label || key.id;
  return (
    <span class="row-actions">
      <Ask
        label="Rotate"
        of={name}
        title={`Replace the secret of ${visible(name)}?`}
        onSubmit={async (form) => {
          const overlap = textOf(form, "overlap");
          const seconds = overlap ? secondsOf(overlap) : 0;
          if (seconds === null) {
            throw new Error("The overlap is a time such as 90min, 24h or 7d.");
          }
          const rotated = await post<{ id: string; key: string }>(`/v1/keys/${key.id}/rotate`, { overlap_s: seconds });
          onSecret({ id: rotated.id, key: rotated.key, signsIn: key.id === own });
        }}
      >
        <p>Its scopes, limits and usage stay.</p>
        <Field label="The old secret stays valid for" name="overlap" placeholder="24h" note="Empty: it ends at once." />
      </Ask>
      <Ask
        label="Limits"
        of={name}
        title={`Limits of ${visible(name)}`}
        action="Set the limits"
        onSubmit={async (form) => {
          await send(`/v1/keys/${key.id}/limits`, { method: "PUT", json: limitsIn(form) });
          onChange();
        }}
      >
        <LimitFields limits={key.limits} />
      </Ask>
      <Ask
        label="Delete"
        of={name}
        title={`Delete the key ${visible(name)}?`}
        isDangerous
        onSubmit={async () => {
          await send(`/v1/keys/${key.id}`, { method: "DELETE" });
          await (key.id === own ? signOut() : onChange());
        }}
      >
        <p>
          The gateway rejects it from now on.
          {key.id === own ? " It is the key of this session: you will be signed out." : ""} Calls that were accepted continue.
        </p>
      </Ask>
    </span>
  );
}
