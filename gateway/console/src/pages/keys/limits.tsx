import type { KeyLimits } from "../../api/records";
import { numberOf, textOf } from "../../core/form";
import { rateOf, rateText } from "../../core/operate/limits";
import { Field } from "../../ui/change/field";

const COUNTS = {
  burst: "Calls at once",
  concurrency: "Calls in flight whose callers wait",
  queued: "Submitted calls that have not ended",
  run_s: "Run time per UTC day, in seconds",
  gpu_s: "GPU seconds per UTC day",
} as const;

export function LimitFields({ limits }: { limits: KeyLimits }) {
  return (
    <>
      <p class="dim">An empty field means no limit.</p>
      <Field label="Calls" name="rate" placeholder="50/s" note="50/s, 600/min or 1000/h." value={limits.rate ? rateText(limits.rate) : ""} />
      {Object.entries(COUNTS).map(([name, label]) => (
        <Field key={name} label={label} name={name} isNumber value={limits[name as keyof KeyLimits] ?? ""} />
      ))}
    </>
  );
}

/** The limits in a form. Throws an Error that says what is wrong. */
export function limitsIn(form: FormData): Record<string, number> {
  const text = textOf(form, "rate");
  const rate = text ? rateOf(text) : null;
  if (text && rate === null) {
    throw new Error("The rate is a number of calls such as 50/s, 600/min or 1000/h.");
  }
  const counts = Object.keys(COUNTS).flatMap((name) => {
    const value = numberOf(form, name);
    return value === null ? [] : [[name, value] as const];
  });
  return { ...(rate === null ? {} : { rate }), ...Object.fromEntries(counts) };
}
