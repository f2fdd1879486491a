import type { User } from "../../api/records";
import { send } from "../../api/request";
import { useResource } from "../../api/resource";
import { visible } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Delete } from "../../ui/change/delete";
import { BoundedTable } from "../../ui/lists/bounded-table";
import { Ago, Empty, ErrorBox, Loading, Panel } from "../../ui/parts";

export default function UsersPage() {
  const { data, problem, reload } = useResource<{ users: readonly User[] }>("/v1/users");
  return (
    <div class="page">
      <div class="title">
        <h1>Users</h1>
        <span class="dim">and programs that have logged in through an OpenID provider</span>
        {data ? (
          <span class="actions">
            <Ask
              label="End all tokens"
              title="End all tokens?"
              isDangerous
              onSubmit={async () => {
                await send("/v1/auth/tokens", { method: "DELETE" });
                reload();
              }}
            >
              <p>
                Tokens of all users and API keys that were issued until now are rejected, and this session ends too. Keys stay valid, and users
                can log in again.
              </p>
            </Ask>
          </span>
        ) : null}
      </div>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? (
        problem ? null : <Loading what="the users" />
      ) : (
        <Panel title="Users">
          <Table users={data.users} onChange={reload} />
        </Panel>
      )}
    </div>
  );
}

function Table({ users, onChange }: { users: readonly User[]; onChange: () => void }) {
  return (
    <BoundedTable
      label="Users"
      rows={users}
      empty={
        <Empty title="No user has logged in.">
          With an OpenID provider, users sign in with <code>gpufn login</code>: see "Login" in the documentation.
        </Empty>
      }
      head={
        <>
          <th>Name</th>
          <th>Id</th>
          <th>Scopes</th>
          <th>Last login</th>
          <th>Provider</th>
          <th />
        </>
      }
    >
      {(user) => (
        <tr key={user.id}>
          <td>{visible(user.name)}</td>
          <td class="mono">{user.id}</td>
          <td class="mono reason">{visible(user.scopes.join(", "))}</td>
          <td>
            <Ago at={user.seen_at} />
          </td>
          <td>{visible(user.issuer)}</td>
          <td>
            <Delete
              path={`/v1/users/${encodeURIComponent(user.id)}/tokens`}
              label="End the tokens"
              of={user.name}
              title={`End the tokens of ${visible(user.name)}?`}
              onDone={onChange}
            >
              <p>The user can log in again. To exclude somebody, change the groups at the identity provider first.</p>
            </Delete>
          </td>
        </tr>
      )}
    </BoundedTable>
  );
}
