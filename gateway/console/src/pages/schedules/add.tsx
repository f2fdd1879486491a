import { useState } from "preact/hooks";
import { post } from "../../api/request";
import { secondsOf, textOf } from "../../core/form";
import { Ask } from "../../ui/change/ask";
import { Choice, Field, TextField } from "../../ui/change/field";

const MISSED = { once: "the newest one", skip: "none", all: "all, at most 100" };
const PRIORITIES = { "": "as the function", hi: "hi", normal: "normal", low: "low" };

export function AddSchedule({ functionName, onChange }: { functionName: string; onChange: () => void }) {
  const [isRepeated, setRepeated] = useState(true);
  async function add(form: FormData): Promise<void> {
    const priority = textOf(form, "priority");
    const delay = isRepeated ? null : secondsOf(textOf(form, "delay"));
    if (!isRepeated && delay === null) {
      throw new Error("The delay is a time such as 90s, 10min, 2h or 3d.");
    }
    await post("/v1/schedules", {
      function: textOf(form, "function"),
      method: textOf(form, "method"),
      arguments: argumentsOf(textOf(form, "arguments")),
      ...(priority ? { priority } : {}),
      ...(isRepeated ? { cron: textOf(form, "cron"), timezone: textOf(form, "timezone") || "UTC", missed: textOf(form, "missed") } : { in_s: delay }),
    });
    onChange();
  }
  return (
    <Ask label="Add a schedule" title="Add a schedule" action="Add" onSubmit={add}>
      <Field label="Function" name="function" required value={functionName} />
      <Field label="Method" name="method" note="Only for a class." />
      <fieldset class="choices">
        <legend>When</legend>
        <label>
          <input type="radio" name="kind" checked={isRepeated} onChange={() => setRepeated(true)} /> repeatedly
        </label>
        <label>
          <input type="radio" name="kind" checked={!isRepeated} onChange={() => setRepeated(false)} /> once
        </label>
      </fieldset>
      {isRepeated ? (
        <>
          <Field label="Cron line" name="cron" required placeholder="0 6 * * MON-FRI" note="Minute, hour, day of the month, month, day of the week." />
          <Field label="Time zone" name="timezone" value={Intl.DateTimeFormat().resolvedOptions().timeZone} />
          <Choice label="Missed calls that are made up for" name="missed" options={MISSED} value="once" />
        </>
      ) : (
        <Field label="Delay" name="delay" required placeholder="10min" note="90s, 10min, 2h or 3d." />
      )}
      <TextField label="Arguments" name="arguments" value="{}" note="A JSON object." />
      <Choice label="Priority" name="priority" options={PRIORITIES} />
    </Ask>
  );
}

function argumentsOf(text: string): unknown {
  try {
    return JSON.parse(text || "{}");
  } catch {
    throw new Error('The arguments are not valid JSON: write an object such as {"full": true}.');
  }
}
