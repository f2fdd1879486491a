import { useNewest } from "../../api/newest";
import { useMay } from "../../api/principal";
import type { DeadLetter } from "../../api/records";
import { post, send } from "../../api/request";
import { bytes, plural, visible } from "../../core/format";
import { Ask } from "../../ui/change/ask";
import { Delete } from "../../ui/change/delete";
import { CallState } from "../../ui/calls-table";
import { FunctionLink } from "../../ui/function-link";
import { FunctionFilter } from "../../ui/lists/functions-filter";
import { NewestPanel } from "../../ui/lists/newest-panel";
import { Ago, Empty } from "../../ui/parts";
import { go, Link, setQuery } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";

export default function DeadLettersPage({ query }: PageProps) {
  const name = query["function"] ?? "";
  const newest = useNewest<DeadLetter>(`/v1/dlq${name ? `/${name}` : ""}`, "letters", 5_000);
  const { reload } = newest;
  const count = newest.rows?.length ?? 0;
  return (
    <div class="page">
      <div class="title">
        <h1>Dead letters</h1>
        <span class="dim">submitted calls that ended without a result</span>
        {name && count ? <All name={name} count={count} onChange={reload} /> : null}
      </div>
      <FunctionFilter name={name} />
      <NewestPanel title="Dead letters" note={name || count === 0 ? "newest first" : "newest first; choose a function to replay or delete all of its letters"} what="dead letter" newest={newest}>
        {(rows) => <Table letters={rows} name={name} onChange={reload} />}
      </NewestPanel>
    </div>
  );
}

function All({ name, count, onChange }: { name: string; count: number; onChange: () => void }) {
  const mayInvoke = useMay("invoke", name);
  const mayDeploy = useMay("deploy", name);
  return (
    <span class="actions">
      {mayInvoke ? (
        <Ask
          label="Replay all"
          title={`Replay the dead letters of ${name}?`}
          onSubmit={async () => {
            await post(`/v1/dlq/${name}/replay`);
            onChange();
          }}
        >
          <p>
            {count} or more calls are submitted again, oldest first, with the same arguments, to the revision that serves now: at
            most a thousand at a time, or as many as the queue takes.
          </p>
        </Ask>
      ) : null}
      {mayDeploy ? (
        <Ask
          label="Delete all"
          title={`Delete all dead letters of ${name}?`}
          isDangerous
          onSubmit={async () => {
            await send(`/v1/dlq/${name}`, { method: "DELETE" });
            onChange();
          }}
        >
          <p>Their arguments are lost, so they can no longer be replayed.</p>
        </Ask>
      ) : null}
    </span>
  );
}

function Table({ letters, name, onChange }: { letters: readonly DeadLetter[]; name: string; onChange: () => void }) {
  if (letters.length === 0) {
    return (
      <Empty title="There is no dead letter.">
        A submitted call that fails in all of its attempts, times out or expires becomes one. It is kept, so that it can be replayed.
      </Empty>
    );
  }
  return (
    <Scroll label="Dead letters">
      <table>
        <thead>
          <tr>
            <th>Call</th>
            {name ? null : <th>Function</th>}
            <th>State</th>
            <th>Died</th>
            <th class="number">Arguments</th>
            <th>Error</th>
            <th />
          </tr>
        </thead>
        <tbody>
          {letters.map((letter) => (
            <tr key={letter.id}>
              <td class="mono">
                <Link to={`/calls/${letter.id}`}>{letter.id}</Link>
              </td>
              {name ? null : (
                <td>
                  <FunctionLink name={letter.method ? `${letter.function}.${letter.method}` : letter.function} />
                  <button type="button" class="plain block small" aria-label={`only its letters: ${letter.function}`} onClick={() => setQuery({ function: letter.function })}>
                    only its letters
                  </button>
                </td>
              )}
              <td>
                <CallState state={letter.state} />
                <span class="dim block">{plural(letter.attempts.length, "attempt")}</span>
              </td>
              <td>
                <Ago at={letter.died_at} />
              </td>
              <td class="number">{bytes(letter.size)}</td>
              <td class="wide reason">{visible(letter.error ? `${letter.error.error_type ?? letter.error.code}: ${letter.error.message}` : "")}</td>
              <td>
                <Actions letter={letter} onChange={onChange} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

function Actions({ letter, onChange }: { letter: DeadLetter; onChange: () => void }) {
  const mayInvoke = useMay("invoke", letter.function);
  const mayDeploy = useMay("deploy", letter.function);
  return (
    <span class="row-actions">
      {mayInvoke ? (
        <Ask
          label="Replay"
          of={letter.id}
          title="Replay this call?"
          onSubmit={async () => {
            const replayed = await post<{ id: string }>(`/v1/dlq/${letter.function}/${letter.id}/replay`);
            go(`/calls/${replayed.id}`);
          }}
        >
          <p>It is submitted again, with the same arguments, to the revision that serves now.</p>
        </Ask>
      ) : null}
      {mayDeploy ? (
        <Delete path={`/v1/dlq/${letter.function}/${letter.id}`} label="Delete" of={letter.id} title="Delete this dead letter?" onDone={onChange}>
          <p>Its arguments are lost, so the call can no longer be replayed.</p>
        </Delete>
      ) : null}
    </span>
  );
}
