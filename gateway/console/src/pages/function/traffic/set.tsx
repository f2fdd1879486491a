/** The dialog that divides the calls. It replaces the whole setting, as `gpufn traffic` does. */

import { useState } from "preact/hooks";
import { send } from "../../../api/request";
import { ruleText, splitBody, sumOf, WHOLE } from "../../../core/traffic";
import { Ask } from "../../../ui/change/ask";
import { Choice, Field, TextField } from "../../../ui/change/field";
import type { Traffic } from "./views";

interface SetProps {
  readonly name: string;
  readonly traffic: Traffic;
  /** The revisions that can get calls, newest first. */
  readonly revisions: readonly number[];
  readonly onChange: () => void;
}

export function SetSplit({ name, traffic, revisions, onChange }: SetProps) {
  const isSplit = traffic.set_at !== null;
  const { mirror } = traffic;
  const choices = { "": "none", ...Object.fromEntries(revisions.filter((each) => each !== traffic.serving).map((each) => [String(each), `revision ${each}`])) };
  return (
    <Ask
      label={isSplit ? "Change the split" : "Split the calls"}
      title={`Split the calls of ${name}`}
      action="Set"
      onSubmit={async (form) => {
        await send(`/v1/functions/${name}/traffic`, { method: "PUT", json: splitBody(form, revisions) });
        onChange();
      }}
    >
      <Weights traffic={traffic} revisions={revisions} />
      <TextField
        label="Headers"
        name="headers"
        rows={2}
        value={traffic.headers.map(ruleText).join("\n")}
        placeholder="x-canary=1:2"
        note="NAME=VALUE:REVISION in each line. Calls with the header go to this revision, whatever its weight."
      />
      <TextField
        label="Undo the split if"
        name="return_if"
        rows={2}
        value={traffic.return_if.join("\n")}
        placeholder={"errors>2%\np99>1.5x"}
        note="A rule in each line: errors>2%, p50>1.5x or p99>1.5x. They are for the revisions beside the serving one."
      />
      <details open={mirror !== null}>
        <summary>Copies of calls</summary>
        <p class="dim">Clients neither wait for a copy nor see its result. A copy runs the code: the function must not have side effects.</p>
        <Choice label="To" name="mirror" options={choices} value={mirror === null ? "" : String(mirror.revision)} />
        <Field label="Percent of the calls" name="percent" isNumber value={mirror?.percent ?? ""} placeholder="100" />
        <Field label="Relative difference of equal numbers" name="tolerance" isNumber value={mirror?.tolerance ?? ""} placeholder="0.00001" />
      </details>
      <details>
        <summary>When rules apply</summary>
        <Field label="Seconds that a rule looks back" name="window_s" isNumber value={traffic.window_s ?? ""} placeholder="60" />
        <Field label="Least calls" name="min_calls" isNumber value={traffic.min_calls ?? ""} placeholder="50" />
      </details>
    </Ask>
  );
}

function Weights({ traffic, revisions }: { traffic: Traffic; revisions: readonly number[] }) {
  const [weights, setWeights] = useState<Readonly<Record<string, number>>>(traffic.weights);
  const sum = sumOf(weights);
  return (
    <fieldset class="weights">
      <legend>Percent of the calls</legend>
      {revisions.map((each) => (
        <label key={each}>
          <span>
            Revision {each}
            {each === traffic.serving ? <span class="dim"> serves</span> : null}
          </span>
          <input
            type="number"
            name={`weight-${each}`}
            min={0}
            max={WHOLE}
            step={1}
            value={weights[String(each)] ?? ""}
            placeholder="0"
            onInput={(event) => setWeights({ ...weights, [each]: Number(event.currentTarget.value) })}
          />
        </label>
      ))}
      <output class={sum === WHOLE ? "dim" : "wrong"}>
        {sum} of {WHOLE} %
      </output>
    </fieldset>
  );
}
