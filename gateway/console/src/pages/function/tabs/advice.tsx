import { useMay } from "../../../api/principal";
import { useResource } from "../../../api/resource";
import { post } from "../../../api/request";
import type { AdviceView } from "../../../api/views";
import { duration, number } from "../../../core/format";
import { Ask } from "../../../ui/change/ask";
import { Badge, Empty, ErrorBox, Loading, Panel } from "../../../ui/parts";
import { Scroll } from "../../../ui/scroll";

const DAYS = 30;

/** What `gpufn advise` says. One click sets what needs no deploy. */
export function AdviceTab({ name, version }: { name: string; version: number }) {
  const { data, problem, reload } = useResource<AdviceView>(`/v1/functions/${name}/advice`, version);
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the history" />;
  }
  return (
    <>
      <Panel title="Advice" note={`from ${number(data.seen.calls)} calls in ${DAYS} days`}>
        <Table name={name} view={data} onChange={reload} />
      </Panel>
      {data.idle_timeout.length ? <Timeouts view={data} /> : null}
    </>
  );
}

interface TableProps {
  readonly name: string;
  readonly view: AdviceView;
  readonly onChange: () => void;
}

function Table({ name, view, onChange }: TableProps) {
  const mayDeploy = useMay("deploy", name);
  if (view.advice.length === 0) {
    return <Empty title="The options fit what was used.">Advice needs at least 100 calls in {DAYS} days.</Empty>;
  }
  return (
    <Scroll label="Advice">
      <table>
        <thead>
          <tr>
            <th>Option</th>
            <th>Set to</th>
            <th>Because</th>
            <th>How</th>
          </tr>
        </thead>
        <tbody>
          {view.advice.map((each) => (
            <tr key={each.option}>
              <td class="mono">{each.option}</td>
              <td class="mono">{each.value || "–"}</td>
              <td class="wrap reason">{each.finding}</td>
              <td>
                {!each.value ? (
                  <span class="dim">for your information</span>
                ) : Object.keys(each.scale).length === 0 ? (
                  <span class="dim">in the code, then deploy</span>
                ) : mayDeploy ? (
                  <Apply name={name} option={each.option} value={each.value} scale={each.scale} onChange={onChange} />
                ) : (
                  <span class="dim">needs the scope deploy</span>
                )}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

interface ApplyProps {
  readonly name: string;
  readonly option: string;
  readonly value: string;
  readonly scale: Readonly<Record<string, number>>;
  readonly onChange: () => void;
}

function Apply({ name, option, value, scale, onChange }: ApplyProps) {
  return (
    <Ask
      label="Apply"
      of={`${option} ${value}`}
      title={`Set ${option} to ${value}?`}
      onSubmit={async () => {
        await post(`/v1/functions/${name}/scale`, scale);
        onChange();
      }}
    >
      <p>It takes effect at once, without a deploy, and holds until the next change, also for later deploys. Scale sets it back.</p>
    </Ask>
  );
}

function Timeouts({ view }: { view: AdviceView }) {
  const longest = Math.max(...view.idle_timeout.map((each) => each.worker_s));
  return (
    <Panel title="Other idle timeouts" note="the calls of two days, replayed with one worker; idle_timeout is set in the code">
      <Scroll label="Other idle timeouts">
        <table>
          <thead>
            <tr>
              <th>Idle timeout</th>
              <th class="number">Cold starts</th>
              <th class="number">Worker time</th>
              <th>Of the longest</th>
            </tr>
          </thead>
          <tbody>
            {view.idle_timeout.map((each) => (
              <tr key={each.idle_timeout_s} aria-selected={each.is_current}>
                <td>
                  {duration(each.idle_timeout_s)} {each.is_current ? <Badge tone="info">now</Badge> : null}
                </td>
                <td class="number">{number(each.cold_starts)}</td>
                <td class="number">{duration(each.worker_s)}</td>
                <td>
                  <span class="meter" aria-hidden="true">
                    <span class={`part ${each.is_current ? "accent" : "quiet"}`} style={{ width: `${(100 * each.worker_s) / longest}%` }} />
                  </span>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}
