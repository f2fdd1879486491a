import type { Call } from "../../api/views";
import { clock, duration, visible } from "../../core/format";
import { Badge, Panel } from "../../ui/parts";
import { Scroll } from "../../ui/scroll";

const REASONS: Readonly<Record<string, string>> = {
  first: "first start",
  raised: "retry after an exception",
  timed_out: "retry after a timeout",
  worker_lost: "retry: its worker was lost",
  device_failed: "again: its GPU failed",
  stopped: "again: its node stopped",
  runner_lost: "again: its runner was lost",
};

export function Attempts({ call }: { call: Call }) {
  if (call.attempts.length === 0) {
    return null;
  }
  return (
    <Panel title="Attempts">
      <Scroll label="Attempts">
        <table>
          <thead>
            <tr>
              <th class="number">Attempt</th>
              <th>Why</th>
              <th>Outcome</th>
              <th>Started</th>
              <th class="number">Took</th>
              <th>Node</th>
              <th>Worker</th>
              <th>Error</th>
            </tr>
          </thead>
          <tbody>
            {call.attempts.map((attempt) => (
              <tr key={attempt.number}>
                <td class="number">{attempt.number}</td>
                <td>{REASONS[attempt.reason ?? ""] ?? attempt.reason?.replaceAll("_", " ") ?? "–"}</td>
                <td>
                  <Badge tone={attempt.outcome === "succeeded" ? "ok" : "bad"}>{attempt.outcome.replaceAll("_", " ")}</Badge>
                </td>
                <td>{attempt.started_at ? clock(attempt.started_at) : "–"}</td>
                <td class="number">{attempt.started_at ? duration(attempt.ended_at - attempt.started_at) : "–"}</td>
                <td>{attempt.node || "–"}</td>
                <td class="mono">{attempt.worker || "–"}</td>
                <td class="wide">{visible(attempt.message ?? "")}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}
