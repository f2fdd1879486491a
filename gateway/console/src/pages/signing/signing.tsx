import { useMay } from "../../api/principal";
import { usePolled } from "../../api/poll";
import type { Signer, Signing } from "../../api/records";
import { send } from "../../api/request";
import { linesOf, textOf } from "../../core/form";
import { plural, visible } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Delete } from "../../ui/change/delete";
import { Field, TextField } from "../../ui/change/field";
import { FunctionLink } from "../../ui/function-link";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { Ago, Badge, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";

const MOST_NAMES = 20; // functions of a key that its row names

export default function SigningPage() {
  const { data, problem, reload } = usePolled<Signing>("/v1/signing", 5_000);
  const isAdmin = useMay("admin");
  return (
    <div class="page">
      <div class="title">
        <h1>Signing</h1>
        <span class="dim">which keys may sign deploys</span>
        {isAdmin && data ? (
          <span class="actions">
            <Trust onChange={reload} />
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the trusted keys" />
      ) : (
        <>
          <Panel title="Trusted keys" note={plural(data.keys.length, "key")}>
            <Keys keys={data.keys} isAdmin={isAdmin} onChange={reload} />
          </Panel>
          <Panel title="Required signatures" note="by environment" actions={isAdmin ? <Require onChange={reload} /> : null}>
            <Required environments={data.required} isAdmin={isAdmin} onChange={reload} />
          </Panel>
        </>
      )}
    </div>
  );
}

function Trust({ onChange }: { onChange: () => void }) {
  return (
    <Ask
      label="Trust a key"
      title="Trust a key"
      action="Trust"
      onSubmit={async (form) => {
        const patterns = linesOf(form, "patterns");
        const json = { public_key: `${textOf(form, "public_key")}\n`, patterns: patterns.length ? patterns : ["*"] };
        await send(`/v1/signing/keys/${encodeURIComponent(textOf(form, "name"))}`, { method: "PUT", json });
        onChange();
      }}
    >
      <p class="dim">
        <code>gpufn signing keygen --out ci.pem</code> makes a pair of keys. The private key stays with its owner. A key of the same name is replaced.
      </p>
      <Field label="Name" name="name" required placeholder="ci" pattern="[a-z0-9](?:[a-z0-9-]*[a-z0-9])?" note="a to z, 0 to 9 and hyphens." />
      <TextField label="Public key" name="public_key" rows={4} required placeholder={"-----BEGIN PUBLIC KEY-----\n…\n-----END PUBLIC KEY-----"} note="The content of ci.pem.pub." />
      <TextField label="May sign" name="patterns" rows={2} placeholder="prod/*" note="Functions: ENV/*, ENV/APP/*, */APP/* or a full name in each line. Empty: all." />
    </Ask>
  );
}

interface ListProps {
  readonly isAdmin: boolean;
  readonly onChange: () => void;
}

function Keys({ keys, isAdmin, onChange }: ListProps & { readonly keys: readonly Signer[] }) {
  return (
    <BoundedTable
      label="Trusted keys"
      rows={keys}
      empty={
        <Empty title="No key is trusted: deploys have no signatures.">
          <pre>gpufn signing keygen --out ci.pem</pre>
        </Empty>
      }
      head={
        <>
          <th>Name</th>
          <th>Key</th>
          <th>May sign</th>
          <th>Added</th>
          <th>Functions that it signed</th>
          <th />
        </>
      }
    >
      {(key) => (
        <tr key={key.name}>
          <td>{key.name}</td>
          <td class="mono">{key.id}</td>
          <td class="mono reason">{visible(key.patterns.join(", "))}</td>
          <td>
            <Ago at={key.added_at} />
          </td>
          <td class="reason">
            <Signed functions={key.functions} />
          </td>
          <td>{isAdmin ? <Remove signer={key} onChange={onChange} /> : null}</td>
        </tr>
      )}
    </BoundedTable>
  );
}

function Signed({ functions }: { functions: readonly string[] }) {
  if (functions.length === 0) {
    return <span class="dim">none that is active</span>;
  }
  const more = functions.length - MOST_NAMES;
  return (
    <>
      {functions.slice(0, MOST_NAMES).map((name, index) => (
        <span key={name}>
          {index ? ", " : ""}
          <FunctionLink name={name} />
        </span>
      ))}
      {more > 0 ? ` and ${plural(more, "other")}` : ""}
    </>
  );
}

function Remove({ signer, onChange }: { signer: Signer; onChange: () => void }) {
  return (
    <span class="row-actions">
      <Delete
        path={`/v1/signing/keys/${encodeURIComponent(signer.name)}`}
        label="Remove"
        of={signer.name}
        title={`Stop trusting ${signer.name}?`}
        onDone={onChange}
      >
        <p>
          {signer.functions.length
            ? `Workers that run go on, but no new ones start for ${plural(signer.functions.length, "function")} that it signed. Deploy them with another key first.`
            : "No active function has its signature."}
        </p>
      </Delete>
    </span>
  );
}

function Require({ onChange }: { onChange: () => void }) {
  return (
    <Ask
      label="Require in an environment"
      title="Require signatures"
      action="Require"
      onSubmit={async (form) => {
        const json = { force: form.get("force") !== null };
        await send(`/v1/signing/required/${encodeURIComponent(textOf(form, "environment"))}`, { method: "PUT", json });
        onChange();
      }}
    >
      <p class="dim">Functions of the environment start only if a trusted key has signed them.</p>
      <Field label="Environment" name="environment" required placeholder="prod" />
      <fieldset class="choices">
        <legend class="hidden">Options</legend>
        <label>
          <input type="checkbox" name="force" /> Even if functions could not start any more
        </label>
      </fieldset>
    </Ask>
  );
}

function Required({ environments, isAdmin, onChange }: ListProps & { readonly environments: readonly string[] }) {
  if (environments.length === 0) {
    return <Empty title="No environment requires signatures.">Unsigned deploys are accepted everywhere, unless a node has rules of its own.</Empty>;
  }
  return (
    <ul class="body required">
      {environments.map((environment) => (
        <li key={environment}>
          <span>
            <Badge tone="info">{environment}</Badge> accepts signed deploys only
          </span>
          {isAdmin ? (
            <Delete
              path={`/v1/signing/required/${encodeURIComponent(environment)}`}
              label="Allow unsigned"
              of={environment}
              title={`Allow unsigned deploys in ${environment}?`}
              onDone={onChange}
            >
              <p>Everybody with the scope deploy for the environment can then deploy without a signature.</p>
            </Delete>
          ) : null}
        </li>
      ))}
    </ul>
  );
}
