import { useState } from "preact/hooks";
import { CallsTable, STATES } from "../../../ui/calls-table";
import { Panel } from "../../../ui/parts";

export function CallsTab({ name }: { name: string }) {
  const [state, setState] = useState("");
  return (
    <Panel
      title="Submitted calls"
      note="newest first"
      actions={
        <label>
          <span class="hidden">State</span>
          <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
            <option value="">All states</option>
            {STATES.map((each) => (
              <option key={each} value={each}>
                {each.replace("_", " ")}
              </option>
            ))}
          </select>
        </label>
      }
    >
      <CallsTable functionName={name} state={state} withFunction={false} />
    </Panel>
  );
}
