import type { Build } from "../../api/records";
import { duration, percent, visible } from "../../core/format";
import { STAGES, type Report } from "../../core/operate/report";
import { Panel } from "../../ui/parts";
import { Bar } from "../../ui/progress";

/** The stages of a build: those that have ended with their result, and the one that runs. */
export function Stages({ build, report }: { build: Build; report: Report | null }) {
  const isRunning = build.state === "building";
  const current = STAGES.findIndex((stage) => stage === build.stage);
  const rows = new Map(report?.stages.map((row) => [row.stage, row]) ?? []);
  return (
    <Panel title="Stages" note={isRunning ? `${percent(build.progress)} done` : undefined}>
      <div class="body">
        {isRunning ? <Bar label="Progress of the build" share={build.progress} /> : null}
        <ol class="stages">
          {STAGES.map((stage, index) => {
            const row = rows.get(stage);
            const isCurrent = isRunning && index === current;
            const isFailed = build.state === "failed" && index === current && !row;
            const state = row || (isRunning && index < current) ? "done" : isCurrent ? "current" : isFailed ? "failed" : "open";
            return (
              <li key={stage} class={state} aria-current={isCurrent ? "step" : undefined}>
                <strong>{stage}</strong>
                <span class="dim">{row ? duration(row.seconds) : state === "open" ? "" : state === "done" ? "done" : state === "failed" ? "failed" : "runs"}</span>
                <span>{visible(row?.found ?? (isCurrent ? build.detail : ""))}</span>
              </li>
            );
          })}
        </ol>
      </div>
    </Panel>
  );
}
