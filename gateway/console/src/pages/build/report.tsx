import { bytes, duration, number, percent, plural, visible } from "../../core/format";
import { partOfLimit, worstOutputs, type Candidate, type Report } from "../../core/operate/report";
import { useBounded } from "../../ui/lists/bounded";
import { Badge, Empty, Panel } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { Scroll } from "../../ui/scroll";
import { LatencyPlotView } from "./latency-plot";

export function ReportView({ report }: { report: Report }) {
  return (
    <>
      <Candidates report={report} />
      <Panel title="Time of a run" note="over the percentile of the measured runs, at the tuned shapes">
        <div class="body">
          {report.candidates.some((each) => each.latency) ? <LatencyPlotView candidates={report.candidates} /> : <Empty title="No candidate was measured." />}
        </div>
      </Panel>
      <Errors report={report} />
    </>
  );
}

function Candidates({ report }: { report: Report }) {
  return (
    <Panel title="Candidates" note={`the best first; in ${report.precision}; ${report.batched ? `up to ${report.max_batch} rows in a run` : visible(report.why_alone || "one call in a run")}`}>
      {report.candidates.length === 0 ? (
        <Empty title="The build ended before it had candidates." />
      ) : (
        <Scroll label="Candidates">
          <table>
            <thead>
              <tr>
                <th>Backend</th>
                <th>Result</th>
                <th class="number">p50</th>
                <th class="number">p90</th>
                <th class="number">p99</th>
                <th class="number">Runs/s</th>
                <th class="number">Rel. L2</th>
                <th class="number">Max abs</th>
                <th class="number">Cosine</th>
                <th class="number">Size</th>
                <th>Nodes</th>
              </tr>
            </thead>
            <tbody>
              {report.candidates.map((each, index) => (
                <CandidateRow key={index} candidate={each} isBest={index === 0 && !each.reason} />
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {report.candidates.some((each) => each.log || each.reason || each.remarks.length) ? <Remarks candidates={report.candidates} /> : null}
    </Panel>
  );
}

function CandidateRow({ candidate, isBest }: { candidate: Candidate; isBest: boolean }) {
  const { latency, accuracy } = candidate;
  return (
    <tr>
      <td>
        {candidate.backend} <span class="dim mono">{candidate.key.slice(0, 12)}</span>
      </td>
      <td>
        {candidate.reason ? <Badge tone="bad">rejected</Badge> : <Badge tone="ok">{isBest ? "best" : "passed"}</Badge>} {candidate.found ? <Badge tone="quiet">existed</Badge> : null}
      </td>
      <td class="number">{duration(latency?.p50_s)}</td>
      <td class="number">{duration(latency?.p90_s)}</td>
      <td class="number">{duration(latency?.p99_s)}</td>
      <td class="number">
        {number(latency?.per_s)}
        {latency && !latency.settled ? " (varies)" : ""}
      </td>
      <td class="number">{error(accuracy?.rel_l2)}</td>
      <td class="number">{error(accuracy?.max_abs)}</td>
      <td class="number">{accuracy?.cosine === null || accuracy?.cosine === undefined ? "–" : accuracy.cosine.toFixed(6)}</td>
      <td class="number">{candidate.size ? bytes(candidate.size) : "–"}</td>
      <td>{candidate.gpu_nodes || candidate.cpu_nodes ? [candidate.gpu_nodes ? `${candidate.gpu_nodes} GPU` : "", candidate.cpu_nodes ? `${candidate.cpu_nodes} CPU` : ""].filter(Boolean).join(", ") : "–"}</td>
    </tr>
  );
}

function Remarks({ candidates }: { candidates: readonly Candidate[] }) {
  return (
    <div>
      {candidates.map((each, index) => {
        const texts = [each.reason, ...each.remarks].filter(Boolean);
        return texts.length ? (
          <details class="group" key={index}>
            <summary>
              {each.backend}: {visible(texts.join("; "))}
            </summary>
            <div class="body">
              {each.notes.length ? <p>Tried: {visible(each.notes.join("; "))}</p> : null}
              {each.log ? (
                <pre class="box" tabIndex={0}>
                  {visible(each.log)}
                </pre>
              ) : null}
            </div>
          </details>
        ) : null;
      })}
    </div>
  );
}

function Errors({ report }: { report: Report }) {
  const { shown, more } = useBounded(worstOutputs(report));
  const limits = Object.entries(report.tolerance).filter(([, limit]) => limit !== null);
  const note = limits.length ? `tolerance: ${limits.map(([name, limit]) => `${name.replace("_", " ")} ${number(limit)}`).join(", ")}` : "no tolerance";
  return (
    <Panel title="Errors" note={`compared with the uploaded model in fp32; ${note}`}>
      {shown.length === 0 ? (
        <Empty title="No output was compared." />
      ) : (
        <Scroll label="Errors">
          <table>
            <thead>
              <tr>
                <th>Output</th>
                <th>Backend</th>
                <th>Case</th>
                <th>Part of its limit</th>
                <th class="number">Rel. L2</th>
                <th class="number">Max abs</th>
                <th class="number">99.9 % below</th>
                <th class="number">Cosine</th>
                <th class="number">Same largest</th>
                <th>Worst element</th>
              </tr>
            </thead>
            <tbody>
              {shown.map(({ backend, output }, index) => {
                const part = partOfLimit(output);
                return (
                  <tr key={index}>
                    <td>
                      {visible(output.name)} <span class="dim">{output.dtype}</span>
                    </td>
                    <td>{backend}</td>
                    <td>{visible(output.case)}</td>
                    <td>
                      {part === null ? (
                        <span class="dim">no limit</span>
                      ) : (
                        <>
                          <Bar label={`Error of ${output.name}`} share={part} tone={part > 1 ? "bad" : part > 0.5 ? "warn" : "ok"} /> {percent(part)}
                        </>
                      )}
                    </td>
                    <td class="number">{error(output.rel_l2)}</td>
                    <td class="number">{error(output.max_abs)}</td>
                    <td class="number">{error(output.p999_abs)}</td>
                    <td class="number">{output.cosine === null ? "–" : output.cosine.toFixed(6)}</td>
                    <td class="number">{percent(output.argmax)}</td>
                    <td>{output.worst_element ? `${visible(output.worst_element.value)} for ${visible(output.worst_element.reference)}` : "–"}</td>
                  </tr>
                );
              })}
            </tbody>
          </table>
        </Scroll>
      )}
      {more}
      <p class="body dim">{plural(worstOutputs(report).length, "comparison")}, the largest error first.</p>
    </Panel>
  );
}

/** An error of arithmetic: 0, or two digits with a power of ten. In JSON an infinity is null. */
function error(value: number | null | undefined): string {
  return value === undefined ? "–" : value === null ? "∞" : value === 0 ? "0" : value.toExponential(1);
}
