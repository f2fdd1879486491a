import { useContext } from "preact/hooks";
import { PrincipalContext, useMay } from "../../api/principal";
import type { Secret } from "../../api/records";
import { post } from "../../api/request";
import { useResource } from "../../api/resource";
import { coversPattern } from "../../core/scopes";
import { number } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Delete } from "../../ui/change/delete";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { FunctionLink } from "../../ui/function-link";
import { Ago, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { SetSecret } from "./set";

export default function SecretsPage() {
  const { data, problem, reload } = useResource<{ secrets: readonly Secret[] }>("/v1/secrets");
  const mayDeploy = useMay("deploy");
  const isAdmin = useMay("admin");
  return (
    <div class="page">
      <div class="title">
        <h1>Secrets</h1>
        <span class="dim">nothing shows a value again</span>
        {data ? (
          <span class="actions">
            {isAdmin && data.secrets.length ? <RotateMasterKey onChange={reload} /> : null}
            {mayDeploy ? <SetSecret onChange={reload} /> : null}
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the secrets" />
      ) : (
        <Panel title="Secrets">
          <Table secrets={data.secrets} onChange={reload} />
        </Panel>
      )}
    </div>
  );
}

function RotateMasterKey({ onChange }: { onChange: () => void }) {
  return (
    <Ask
      label="Rotate the master key"
      title="Rotate the master key?"
      action="Rotate"
      onSubmit={async () => {
        await post("/v1/secrets/rotate");
        onChange();
      }}
    >
      <p>
        All secrets are encrypted under a new key. Values and workers do not change. With several hosts, put the new key before the old one on
        each of them first.
      </p>
    </Ask>
  );
}

function Table({ secrets, onChange }: { secrets: readonly Secret[]; onChange: () => void }) {
  const scopes = useContext(PrincipalContext).scopes;
  return (
    <BoundedTable
      label="Secrets"
      rows={secrets}
      empty={
        <Empty title="No secret is here.">
          A secret is an environment variable of functions that declare it with <code>secrets=</code>.
        </Empty>
      }
      head={
        <>
          <th>Name</th>
          <th>For</th>
          <th class="number">Version</th>
          <th>Set</th>
          <th>Functions that get it</th>
          <th />
        </>
      }
    >
      {(secret) => (
        <tr key={`${secret.scope} ${secret.name}`}>
          <td class="mono">{secret.name}</td>
          <td>{secret.scope === "*" ? "every function" : <span class="mono">{secret.scope}</span>}</td>
          <td class="number">{number(secret.version)}</td>
          <td>
            <Ago at={secret.updated_at} />
          </td>
          <td>
            {secret.functions.length === 0 ? <span class="dim">none</span> : null}
            {secret.functions.slice(0, 8).map((name, index) => (
              <span key={name}>
                {index ? ", " : ""}
                <FunctionLink name={name} />
              </span>
            ))}
            {secret.functions.length > 8 ? ` and ${secret.functions.length - 8} more` : ""}
          </td>
          <td>
            {coversPattern(scopes, "deploy", secret.scope) ? (
              <span class="row-actions">
                <SetSecret secret={secret} onChange={onChange} />
                <Delete
                  path={`/v1/secrets/${secret.name}?scope=${encodeURIComponent(secret.scope)}`}
                  label="Delete"
                  of={`${secret.name} of ${secret.scope}`}
                  title={`Delete the secret ${secret.name}?`}
                  onDone={onChange}
                >
                  <p>Its functions get the next wider secret of this name, if they may. The value is lost.</p>
                </Delete>
              </span>
            ) : null}
          </td>
        </tr>
      )}
    </BoundedTable>
  );
}
