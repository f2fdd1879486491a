import { useState } from "preact/hooks";
import { shownBody, type ShownBody } from "../../../api/body";
import { Problem, send } from "../../../api/request";
import type { Method } from "../../../api/views";
import type { Json } from "../../../core/delta";
import { visible } from "../../../core/format";
import { argumentsFrom, fieldsOf, type Field } from "../../../core/signature";
import { BodyView } from "../../../ui/body-view";
import { Empty, ErrorBox, Panel } from "../../../ui/parts";
import { Link } from "../../../ui/router";

interface InvokeTabProps {
  readonly name: string;
  readonly methods: readonly Method[];
  readonly isApplication: boolean;
}

export function InvokeTab({ name, methods, isApplication }: InvokeTabProps) {
  const [chosen, setChosen] = useState(0);
  const method = methods[chosen];
  if (isApplication || method === undefined) {
    return (
      <Panel title="Invoke">
        <Empty title="This function serves web requests: it is opened, not invoked." />
      </Panel>
    );
  }
  return (
    <>
      {methods.length > 1 ? (
        <label>
          Method{" "}
          <select value={chosen} onChange={(event) => setChosen(Number(event.currentTarget.value))}>
            {methods.map((each, index) => (
              <option key={each.name ?? ""} value={index}>
                {each.name}
              </option>
            ))}
          </select>
        </label>
      ) : null}
      <InvokeForm key={method.name ?? ""} path={method.name ? `${name}.${method.name}` : name} method={method} />
    </>
  );
}

interface Outcome {
  readonly body?: ShownBody;
  readonly timing?: string;
  readonly call?: string;
  readonly isQueued?: boolean;
  readonly problem?: unknown;
}

function InvokeForm({ path, method }: { path: string; method: Method }) {
  const fields = fieldsOf(method.parameters ?? {});
  const [texts, setTexts] = useState<Readonly<Record<string, string>>>(() => Object.fromEntries(fields.map((each) => [each.name, each.initial])));
  const [outcome, setOutcome] = useState<Outcome | null>(null);
  const [isBusy, setBusy] = useState(false);

  async function run(submits: boolean): Promise<void> {
    setBusy(true);
    setOutcome(null);
    try {
      setOutcome(await invoke(path, argumentsFrom(fields, texts), submits));
    } catch (problem) {
      setOutcome({ problem });
    }
    setBusy(false);
  }

  return (
    <>
      <Panel title={`Invoke ${path}`} note={method.doc ? visible(method.doc.split("\n")[0] ?? "") : undefined}>
        <form
          class="body"
          onSubmit={(event) => {
            event.preventDefault();
            void run(false);
          }}
        >
          {fields.length === 0 ? <p class="dim">It has no parameters.</p> : null}
          {fields.map((field) => (
            <FieldInput key={field.name} field={field} value={texts[field.name] ?? ""} onChange={(value) => setTexts({ ...texts, [field.name]: value })} />
          ))}
          <div class="toolbar">
            <button type="submit" class="primary" disabled={isBusy}>
              {isBusy ? "Runs …" : "Invoke"}
            </button>
            <button type="button" disabled={isBusy} onClick={() => void run(true)}>
              Submit to the queue
            </button>
          </div>
        </form>
      </Panel>
      {outcome ? <OutcomeView outcome={outcome} /> : null}
    </>
  );
}

async function invoke(path: string, parameters: Readonly<Record<string, Json>>, submits: boolean): Promise<Outcome> {
  const response = await send(`/v1/functions/${path}/${submits ? "submit" : "invoke"}`, { method: "POST", json: parameters });
  const call = response.headers.get("x-gpufn-invocation") ?? "";
  if (submits) {
    const accepted = (await response.json()) as { id: string };
    return { call: accepted.id, isQueued: true };
  }
  return { body: await shownBody(response), timing: response.headers.get("server-timing") ?? "", call };
}

function OutcomeView({ outcome }: { outcome: Outcome }) {
  const { problem } = outcome;
  if (problem) {
    const traceback = problem instanceof Problem ? problem.fields["traceback"] : null;
    return (
      <Panel title="Error">
        <div class="body">
          <ErrorBox error={problem} />
          {typeof traceback === "string" ? <pre class="box">{visible(traceback)}</pre> : null}
        </div>
      </Panel>
    );
  }
  if (outcome.isQueued) {
    return (
      <Panel title="Submitted">
        <p class="body">
          <span>
            The call is <Link to={`/calls/${outcome.call ?? ""}`}>{outcome.call}</Link>.
          </span>
        </p>
      </Panel>
    );
  }
  return (
    <Panel title="Result" note={timingText(outcome.timing ?? "")}>
      <div class="body">{outcome.body ? <BodyView body={outcome.body} name={outcome.call ?? "result"} /> : null}</div>
    </Panel>
  );
}

/** "queue;dur=1.0, run;dur=3.0" as "queue 1.0 ms, run 3.0 ms". */
function timingText(header: string): string {
  return header.replaceAll(/;dur=([\d.]+)/g, " $1 ms");
}

interface FieldInputProps {
  readonly field: Field;
  readonly value: string;
  readonly onChange: (value: string) => void;
}

function FieldInput({ field, value, onChange }: FieldInputProps) {
  const id = `argument-${field.name}`;
  const common = { id, name: field.name, required: field.isRequired && field.kind !== "text", "aria-describedby": `${id}-type` };
  return (
    <div class="field">
      <label for={id}>{field.name}</label>
      {field.kind === "choice" || field.kind === "boolean" ? (
        <select {...common} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
          <option value="">{field.isRequired ? "choose" : "default"}</option>
          {(field.kind === "boolean" ? ["true", "false"] : field.choices).map((each) => (
            <option key={each} value={each}>
              {each}
            </option>
          ))}
        </select>
      ) : field.kind === "json" ? (
        <textarea {...common} rows={4} value={value} placeholder="JSON" onInput={(event) => onChange(event.currentTarget.value)} />
      ) : field.kind === "text" ? (
        <input {...common} type="text" value={value} onInput={(event) => onChange(event.currentTarget.value)} />
      ) : (
        <input {...common} type="number" step={field.kind === "integer" ? 1 : "any"} value={value} onInput={(event) => onChange(event.currentTarget.value)} />
      )}
      <span class="dim" id={`${id}-type`}>
        {field.type}
        {field.isRequired ? "" : ", optional"}
        {field.description ? `: ${visible(field.description)}` : ""}
      </span>
    </div>
  );
}
