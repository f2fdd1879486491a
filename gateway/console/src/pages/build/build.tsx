import { usePolled } from "../../api/poll";
import { useMay, useMayEverything } from "../../api/principal";
import type { Build } from "../../api/records";
import { send } from "../../api/request";
import { useResource } from "../../api/resource";
import { bytes, duration, time, visible } from "../../core/format";
import type { Report } from "../../core/operate/report";
import { Ask } from "../../ui/change/ask";
import { BuildState } from "../builds/state";
import { Download } from "../../ui/download";
import { FunctionLink } from "../../ui/function-link";
import { Badge, ErrorBox, Loading, Panel } from "../../ui/parts";
import { Link } from "../../ui/router";
import type { PageProps } from "..";
import { ReportView } from "./report";
import { Stages } from "./stages";

export default function BuildPage({ parameters }: PageProps) {
  const path = `/v1/builds/${encodeURIComponent(parameters["id"] ?? "")}`;
  const { data: build, problem, reload } = usePolled<Build>(path, 1_000);
  const report = useResource<Report>(build?.links.report ? `${path}/report` : "", build?.state);
  if (build === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the build" />;
  }
  return (
    <div class="page">
      <Title build={build} onChange={reload} />
      {problem ? <ErrorBox error={problem} /> : null}
      <Facts build={build} />
      <Stages build={build} report={report.data} />
      {build.error ? <Failure build={build} /> : null}
      {report.problem ? <ErrorBox error={report.problem} /> : null}
      {report.data ? <ReportView report={report.data} /> : null}
    </div>
  );
}

function Title({ build, onChange }: { build: Build; onChange: () => void }) {
  const mayOfFunction = useMay("deploy", build.function || undefined);
  const mayAll = useMayEverything("deploy");
  const mayCancel = build.function ? mayOfFunction : mayAll;
  const isOver = build.ended_at !== null || build.cancel;
  return (
    <div class="title">
      <h1>{visible(build.model.files[0]?.name ?? "")}</h1>
      <BuildState build={build} />
      <span>for {visible(build.device)}</span>
      <span class="actions">
        {build.links.page ? <Download path={build.links.page} name={`build-${build.id}.html`} label="Download the report" /> : null}
        {mayCancel && !isOver ? (
          <Ask
            label="Cancel the build"
            title="Cancel this build?"
            isDangerous
            onSubmit={async () => {
              await send(`/v1/builds/${build.id}`, { method: "DELETE" });
              onChange();
            }}
          >
            <p>{build.function ? `The revision of ${build.function} that waits for it fails. Another revision goes on serving.` : "Its engines are not published."}</p>
          </Ask>
        ) : null}
      </span>
    </div>
  );
}

function Facts({ build }: { build: Build }) {
  const seconds = build.started_at !== null && build.ended_at !== null ? build.ended_at - build.started_at : null;
  return (
    <Panel title="Build" note={<span class="mono">{build.id}</span>}>
      <dl class="pairs body">
        <dt>Function</dt>
        <dd>{build.function ? <FunctionLink name={build.function} /> : "none: it was built without a deploy"}</dd>
        <dt>Model</dt>
        <dd>
          {build.model.files.map((file) => `${visible(file.name)} (${bytes(file.size)})`).join(", ")}, wanted in {build.model.precision ?? "fp32"}
        </dd>
        <dt>Requested</dt>
        <dd>{time(build.created_at)}</dd>
        {build.ended_at === null ? null : (
          <>
            <dt>Ended</dt>
            <dd>
              {time(build.ended_at)}
              {seconds === null ? "" : `, after ${duration(seconds)}`}
              {build.cached ? "; its engines existed already" : ""}
            </dd>
          </>
        )}
        {build.ahead ? (
          <>
            <dt>It waits</dt>
            <dd>for {build.ahead.id ? <Link to={`/builds/${build.ahead.id}`}>another build</Link> : "another build"}</dd>
          </>
        ) : null}
        {build.builder ? (
          <>
            <dt>Builder</dt>
            <dd class="mono">{build.builder}</dd>
          </>
        ) : null}
        {build.remarks.length ? (
          <>
            <dt>Remarks</dt>
            <dd>{visible(build.remarks.join("; "))}</dd>
          </>
        ) : null}
      </dl>
    </Panel>
  );
}

function Failure({ build }: { build: Build }) {
  const { error } = build;
  return error === null ? null : (
    <Panel title="Error" note={<Badge tone="bad">{error.code}</Badge>}>
      <div class="body">
        <p>
          {error.stage ? <strong>{error.stage}: </strong> : null}
          {visible(error.message)}
        </p>
        {error.traceback ? (
          <pre class="box" tabIndex={0}>
            {visible(error.traceback.trimEnd())}
          </pre>
        ) : null}
      </div>
    </Panel>
  );
}
