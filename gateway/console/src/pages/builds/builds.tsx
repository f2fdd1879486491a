import { useNewest } from "../../api/newest";
import type { Build } from "../../api/records";
import { duration, visible } from "../../core/format";
import { BuildState } from "./state";
import { FunctionLink } from "../../ui/function-link";
import { NewestPanel } from "../../ui/lists/newest-panel";
import { Ago, Empty } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { Link } from "../../ui/router";
import { Scroll } from "../../ui/scroll";

export default function BuildsPage() {
  const newest = useNewest<Build>("/v1/builds", "builds", 2_000);
  return (
    <div class="page">
      <div class="title">
        <h1>Builds</h1>
        <span class="dim">of engines, from models</span>
      </div>
      <NewestPanel title="Builds" what="build" newest={newest}>
        {(rows) => <Table builds={rows} />}
      </NewestPanel>
    </div>
  );
}

function Table({ builds }: { builds: readonly Build[] }) {
  if (builds.length === 0) {
    return (
      <Empty title="No model was built.">
        <pre>gpufn deploy model.onnx</pre>
      </Empty>
    );
  }
  return (
    <Scroll label="Builds">
      <table>
        <thead>
          <tr>
            <th>Build</th>
            <th>Model</th>
            <th>Device</th>
            <th>Function</th>
            <th>State</th>
            <th>Progress</th>
            <th>Began</th>
            <th class="number">Duration</th>
            <th>Error, or what it does</th>
          </tr>
        </thead>
        <tbody>
          {builds.map((build) => (
            <tr key={build.id}>
              <td class="mono">
                <Link to={`/builds/${build.id}`}>{build.id}</Link>
              </td>
              <td>
                {visible(build.model.files[0]?.name ?? "")} <span class="dim">{build.model.precision ?? "fp32"}</span>
              </td>
              <td>{visible(build.device)}</td>
              <td>{build.function ? <FunctionLink name={build.function} /> : <span class="dim">none</span>}</td>
              <td>
                <BuildState build={build} />
              </td>
              <td>
                <Bar label={`Progress of ${build.id}`} share={build.progress} tone={build.state === "succeeded" ? "ok" : build.state === "failed" ? "bad" : "accent"} />
              </td>
              <td>
                <Ago at={build.started_at ?? build.created_at} />
              </td>
              <td class="number">{build.cached ? "cached" : build.started_at !== null && build.ended_at !== null ? duration(build.ended_at - build.started_at) : "–"}</td>
              <td class="wide reason">
                <div class="few-lines">{visible(build.error?.message ?? (build.state === "building" ? [build.stage, build.detail].filter(Boolean).join(": ") : ""))}</div>
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
