import { useState } from "preact/hooks";
import { usePolled } from "../../api/poll";
import { useMay } from "../../api/principal";
import { useResource } from "../../api/resource";
import { number, plural, visible } from "../../core/format";
import { Delete } from "../../ui/change/delete";
import { useBounded } from "../../ui/lists/bounded";
import { Empty, ErrorBox, Loading, Panel } from "../../ui/parts";
import { Scroll } from "../../ui/scroll";

interface Named {
  readonly name: string;
  readonly count: number;
}

export default function QueuesPage() {
  const queues = usePolled<{ queues: readonly { name: string; items: number }[] }>("/v1/queues", 5_000);
  const dicts = usePolled<{ dicts: readonly { name: string; entries: number }[] }>("/v1/dicts", 5_000);
  const [chosen, setChosen] = useState("");
  return (
    <div class="page">
      <div class="title">
        <h1>Queues and dicts</h1>
        <span class="dim">that functions share</span>
      </div>
      <Panel title="Queues" note="items that wait for a reader">
        {queues.data === null ? (
          queues.problem ? <ErrorBox error={queues.problem} /> : <Loading what="the queues" />
        ) : (
          <Table
            kind="queue"
            counted="Items"
            list={queues.data.queues.map(({ name, items }) => ({ name, count: items }))}
            onChange={queues.reload}
          />
        )}
      </Panel>
      <Panel title="Dicts">
        {dicts.data === null ? (
          dicts.problem ? <ErrorBox error={dicts.problem} /> : <Loading what="the dicts" />
        ) : (
          <Table
            kind="dict"
            counted="Entries"
            list={dicts.data.dicts.map(({ name, entries }) => ({ name, count: entries }))}
            onChange={dicts.reload}
            onKeys={(name) => setChosen(name === chosen ? "" : name)}
          />
        )}
      </Panel>
      {chosen ? <Keys key={chosen} name={chosen} /> : null}
    </div>
  );
}

interface TableProps {
  readonly kind: "queue" | "dict";
  readonly counted: string;
  readonly list: readonly Named[];
  readonly onChange: () => void;
  readonly onKeys?: (name: string) => void;
}

function Table({ kind, counted, list, onChange, onKeys }: TableProps) {
  const { shown, more } = useBounded(list);
  if (list.length === 0) {
    return (
      <Empty title={`There is no ${kind}.`}>
        <code>{kind === "queue" ? 'gpufn.Queue("jobs").put(item)' : 'gpufn.Dict("cache")["key"] = value'}</code> makes one.
      </Empty>
    );
  }
  return (
    <>
      <Scroll label={kind === "queue" ? "Queues" : "Dicts"}>
        <table>
          <thead>
            <tr>
              <th>Name</th>
              <th class="number">{counted}</th>
              <th />
            </tr>
          </thead>
          <tbody>
            {shown.map((each) => (
              <Row key={each.name} kind={kind} named={each} onChange={onChange} {...(onKeys ? { onKeys } : {})} />
            ))}
          </tbody>
        </table>
      </Scroll>
      {more}
    </>
  );
}

interface RowProps {
  readonly kind: "queue" | "dict";
  readonly named: Named;
  readonly onChange: () => void;
  readonly onKeys?: (name: string) => void;
}

function Row({ kind, named: { name, count }, onChange, onKeys }: RowProps) {
  const mayDeploy = useMay("deploy", name);
  const mayInvoke = useMay("invoke", name);
  return (
    <tr>
      <td>{name}</td>
      <td class="number">{number(count)}</td>
      <td>
        <span class="row-actions">
          {onKeys && mayInvoke ? (
            <button type="button" aria-label={`Keys of ${name}`} onClick={() => onKeys(name)}>
              Keys
            </button>
          ) : null}
          {mayDeploy ? (
            <Delete path={`/v1/${kind}s/${name}`} label="Delete" of={name} title={`Delete the ${kind} ${name}?`} onDone={onChange}>
              <p>All of its {kind === "queue" ? "items" : "entries"} are deleted.</p>
            </Delete>
          ) : null}
        </span>
      </td>
    </tr>
  );
}

function Keys({ name }: { name: string }) {
  const { data, problem } = useResource<{ keys: readonly string[] }>(`/v1/dicts/${name}/keys`);
  const keys = data?.keys ?? [];
  const { shown, more } = useBounded(keys);
  return (
    <Panel title={`Keys of ${name}`} note={data ? plural(keys.length, "key") : undefined}>
      {problem ? <ErrorBox error={problem} /> : null}
      {data === null ? null : keys.length === 0 ? (
        <Empty title="The dict is empty." />
      ) : (
        <ul class="body names">
          {shown.map((key) => (
            <li key={key} class="mono">
              {visible(key)}
            </li>
          ))}
        </ul>
      )}
      {more}
    </Panel>
  );
}
