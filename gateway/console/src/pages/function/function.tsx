import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { useLive } from "../../api/live";
import { useMay } from "../../api/principal";
import { useResource } from "../../api/resource";
import type { FunctionLive, FunctionView } from "../../api/views";
import { splitText } from "../../core/traffic";
import type { PageProps } from "..";
import { Ago, Badge, ErrorBox, LiveMark, Loading } from "../../ui/parts";
import { Link } from "../../ui/router";
import { ScaleDialog } from "./scale";
import { AdviceTab } from "./tabs/advice";
import { CallsTab } from "./tabs/calls";
import { ErrorsTab } from "./tabs/errors";
import { InvokeTab } from "./tabs/invoke";
import { LogsTab } from "./tabs/logs";
import { OptionsTab } from "./tabs/options";
import { ProfileTab } from "./tabs/profile";
import { RevisionsTab } from "./tabs/revisions";
import { StatusTab } from "./tabs/status";
import { TrafficTab } from "./traffic/traffic";

const TABS = {
  "": "Status",
  logs: "Logs",
  errors: "Errors",
  calls: "Calls",
  revisions: "Revisions",
  traffic: "Traffic",
  invoke: "Invoke",
  options: "Options",
  advice: "Advice",
  profile: "Profile",
} as const;

export default function FunctionPage({ parameters, query }: PageProps) {
  const name = parameters["name"] ?? "";
  const { data: live, connection, problem } = useLive<FunctionLive>(`/v1/console/functions/${name}`);
  const view = useResource<FunctionView>(`/v1/functions/${name}`, live?.updated_at);
  const tab = query["tab"] ?? "";
  const isOffered: Readonly<Record<string, boolean>> = { invoke: useMay("invoke", name), profile: useMay("deploy", name) };
  if (live === null || view.data === null) {
    const error = problem ?? view.problem;
    return error ? <ErrorBox error={error} /> : <Loading what={name} />;
  }
  const tabs = Object.entries(TABS).filter(([key]) => isOffered[key] ?? true);
  return (
    <div class="page">
      <Title name={name} live={live} view={view.data}>
        <LiveMark connection={connection} />
      </Title>
      {problem ? <ErrorBox error={problem} /> : null}
      <nav class="tabs" aria-label={`Views of ${name}`}>
        {tabs.map(([key, label]) => (
          <Link key={key} to={`/functions/${name}`} query={{ tab: key }} current={key === tab}>
            {label}
          </Link>
        ))}
      </nav>
      <Tab tab={tab} name={name} live={live} view={view.data} isLive={connection === "live"} />
    </div>
  );
}

interface TabProps {
  readonly tab: string;
  readonly name: string;
  readonly live: FunctionLive;
  readonly view: FunctionView;
  readonly isLive: boolean;
}

function Tab({ tab, name, live, view, isLive }: TabProps) {
  switch (tab) {
    case "logs":
      return <LogsTab name={name} />;
    case "errors":
      return <ErrorsTab name={name} />;
    case "calls":
      return <CallsTab name={name} />;
    case "revisions":
      return <RevisionsTab name={name} version={live.updated_at} />;
    case "traffic":
      return <TrafficTab name={name} version={live.updated_at} />;
    case "invoke":
      return <InvokeTab name={name} methods={view.spec.methods} isApplication={view.spec.web !== undefined && view.spec.web.kind !== "endpoint"} />;
    case "options":
      return <OptionsTab view={view} />;
    case "profile":
      return <ProfileTab name={name} processes={live.processes} />;
    case "advice":
      return <AdviceTab name={name} version={live.updated_at} />;
    default:
      return <StatusTab name={name} live={live} isLive={isLive} />;
  }
}

interface TitleProps {
  readonly name: string;
  readonly live: FunctionLive;
  readonly view: FunctionView;
  readonly children: ComponentChildren;
}

function Title({ name, live, view, children }: TitleProps) {
  const [isScaling, setScaling] = useState(false);
  const mayDeploy = useMay("deploy", name);
  const web = view.spec.web;
  return (
    <>
      <div class="title">
        <h1>{name}</h1>
        <Badge tone={live.split ? "info" : "quiet"}>{live.split ? splitText(live.split) : `revision ${live.serving}`}</Badge>
        {live.active !== live.serving ? <Badge tone="info">revision {live.active} is next</Badge> : null}
        <Badge tone="quiet">{view.spec.resources.gpu.join(" or ") || "CPU"}</Badge>
        {children}
        <span class="actions">
          {web ? (
            <a class="button" href={webAddress(name)} target="_blank" rel="noopener noreferrer">
              Open
            </a>
          ) : null}
          {mayDeploy ? (
            <button type="button" onClick={() => setScaling(true)}>
              Scale
            </button>
          ) : null}
        </span>
      </div>
      <p class="dim">
        Deployed <Ago at={view.deployed_at} />
        {view.source ? ` from ${view.source.file || "a notebook"} of ${view.source.project}` : ""}
        {view.source?.deployer ? ` by ${view.source.deployer}` : ""}
      </p>
      {isScaling ? <ScaleDialog name={name} live={live} spec={view.spec} onClose={() => setScaling(false)} /> : null}
    </>
  );
}

function webAddress(name: string): string {
  return `/web/${name.includes("/") ? name : `default/default/${name}`}/`;
}
