import { useEffect, useMemo, useState } from "preact/hooks";
import { send } from "../../../api/request";
import type { WorkerView } from "../../../api/views";
import { bytes, duration, percent, plural, visible } from "../../../core/format";
import { textOf, topOf, treeOf, type Node, type Speedscope } from "../../../core/profile/flame";
import { save } from "../../../ui/download";
import { FlameGraph } from "../../../ui/flame-graph";
import { Empty, ErrorBox, Panel } from "../../../ui/parts";
import { Scroll } from "../../../ui/scroll";

const SECONDS = [5, 10, 30, 60] as const;
const SAMPLES_PER_S = 100;
const MOST_ROWS = 15;

interface Profile {
  readonly text: string;
  readonly root: Node;
  readonly isMemory: boolean;
  readonly worker: string;
  readonly seconds: number;
}

/** Sample a worker, as `gpufn profile` does. The gateway records it in the audit log. */
export function ProfileTab({ name, processes }: { name: string; processes: Readonly<Record<string, WorkerView>> }) {
  const [profile, setProfile] = useState<Profile | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const [runs, setRuns] = useState<number | null>(null);
  const workers = Object.keys(processes);

  async function run(form: FormData): Promise<void> {
    const seconds = Number(form.get("seconds"));
    const isMemory = form.get("kind") === "memory";
    setRuns(seconds);
    setProblem(null);
    try {
      const json = { kind: form.get("kind"), seconds, worker: form.get("worker"), idle: form.get("idle") !== null };
      const response = await send(`/v1/functions/${name}/profile`, { method: "POST", json });
      const text = await response.text();
      setProfile({ text, root: treeOf(JSON.parse(text) as Speedscope), isMemory, worker: response.headers.get("x-gpufn-worker") ?? "", seconds });
    } catch (error) {
      setProblem(error);
    }
    setRuns(null);
  }

  return (
    <>
      <Panel title="Profile" note="a worker is sampled from outside and not stopped; it is recorded in the audit log">
        <form
          class="toolbar body"
          onSubmit={(event) => {
            event.preventDefault();
            void run(new FormData(event.currentTarget));
          }}
        >
          <label>
            of{" "}
            <select name="kind" aria-label="Kind">
              <option value="cpu">time</option>
              <option value="memory">memory (slows the worker)</option>
            </select>
          </label>
          <label>
            for{" "}
            <select name="seconds" aria-label="Length">
              {SECONDS.map((each) => (
                <option key={each} value={each}>
                  {each} s
                </option>
              ))}
            </select>
          </label>
          <label>
            in{" "}
            <select name="worker" aria-label="Worker">
              <option value="">a worker that runs a call, or any</option>
              {workers.map((each) => (
                <option key={each} value={each}>
                  {each}
                </option>
              ))}
            </select>
          </label>
          <label>
            <input type="checkbox" name="idle" /> threads that wait too
          </label>
          <button type="submit" class="primary" disabled={runs !== null || workers.length === 0}>
            Profile
          </button>
          {runs === null ? null : <Countdown seconds={runs} />}
        </form>
        {workers.length === 0 ? <Empty title="No worker runs.">Call the function, and profile it meanwhile.</Empty> : null}
      </Panel>
      {problem ? <ErrorBox error={problem} /> : null}
      {profile === null ? null : <Result name={name} profile={profile} />}
    </>
  );
}

function Countdown({ seconds }: { seconds: number }) {
  const [left, setLeft] = useState(seconds);
  useEffect(() => {
    const timer = setInterval(() => setLeft((before) => Math.max(0, before - 1)), 1000);
    return () => clearInterval(timer);
  }, []);
  return <span role="status">{left > 0 ? `samples, ${left} s left` : "reads the stacks"} …</span>;
}

function Result({ name, profile }: { name: string; profile: Profile }) {
  const { root, isMemory } = profile;
  const [search, setSearch] = useState("");
  const rows = useMemo(() => topOf(root, MOST_ROWS), [root]);
  const format = isMemory ? bytes : duration;
  const what = isMemory ? `${bytes(root.total)} allocated and kept` : plural(Math.round(root.total * SAMPLES_PER_S), "sample");
  const file = `${name.replaceAll("/", "-")}.speedscope.json`;
  return (
    <>
      <Panel
        title={isMemory ? "Where memory was allocated" : "Where the time went"}
        note={`${what} in ${profile.seconds} s, worker ${profile.worker}`}
        actions={
          <>
            <input type="search" aria-label="Mark frames" placeholder="Mark frames" value={search} onInput={(event) => setSearch(event.currentTarget.value)} />
            <button type="button" onClick={() => save(new Blob([profile.text]), file)}>
              Download for speedscope
            </button>
          </>
        }
      >
        {rows.length === 0 ? (
          <Empty title={isMemory ? "Nothing was allocated and kept." : "No thread ran in this time."}>{isMemory ? null : "“Threads that wait too” shows the others."}</Empty>
        ) : (
          <div class="body">
            <FlameGraph label={`Flame graph of ${name}`} root={root} search={search} format={format} />
          </div>
        )}
      </Panel>
      {rows.length === 0 ? null : (
        <Panel title={isMemory ? "Lines that allocated most" : "Functions that ran longest themselves"}>
          <Scroll label="The heaviest frames">
            <table>
              <thead>
                <tr>
                  <th class="number">Itself</th>
                  <th class="number">With its calls</th>
                  <th class="number">{isMemory ? "Bytes" : "Time"}</th>
                  <th>{isMemory ? "Line" : "Function"}</th>
                </tr>
              </thead>
              <tbody>
                {rows.map((row) => (
                  <tr key={textOf(row.frame)}>
                    <td class="number">{percent(row.own / root.total)}</td>
                    <td class="number">{percent(row.total / root.total)}</td>
                    <td class="number">{format(row.own)}</td>
                    <td class="mono wide">{visible(textOf(row.frame))}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Scroll>
          <p class="body dim">speedscope.app opens the file in the browser, and uploads nothing.</p>
        </Panel>
      )}
    </>
  );
}
