import { useEffect, useRef, useState } from "preact/hooks";
import { verifyLog } from "../../api/audit";
import type { Chain } from "../../core/operate/audit";
import { number, plural } from "../../core/format";
import { Badge, ErrorBox, Panel } from "../../ui/parts";
import { Bar } from "../../ui/progress";

/** The check that no record was changed, removed or inserted. This browser computes the hashes. */
export function Verify() {
  const [noted, setNoted] = useState("");
  const [chain, setChain] = useState<{ chain: Chain; all: number; isDone: boolean } | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const abort = useRef<AbortController | null>(null);
  useEffect(() => () => abort.current?.abort(), []);
  async function verify(event: SubmitEvent): Promise<void> {
    event.preventDefault();
    abort.current?.abort();
    const own = new AbortController();
    abort.current = own;
    setProblem(null);
    setChain(null);
    try {
      const done = await verifyLog(noted.trim(), (part, all) => setChain({ chain: part, all, isDone: false }), own.signal);
      setChain({ chain: done, all: done.last ?? 0, isDone: true });
    } catch (error) {
      if (!own.signal.aborted) {
        setProblem(error);
      }
    }
  }
  return (
    <Panel title="Verify" note="this browser reads all records and computes their hash chain">
      <form class="body" onSubmit={(event) => void verify(event)}>
        <div class="field">
          <label for="noted">Hash that you noted earlier, if any</label>
          <input id="noted" class="mono" value={noted} maxLength={64} onInput={(event) => setNoted(event.currentTarget.value)} />
        </div>
        <span>
          <button type="submit" class="primary">
            Verify the log
          </button>
        </span>
        {chain && !chain.isDone ? <Bar label="Records that were checked" share={chain.all ? (chain.chain.last ?? 0) / chain.all : 0} /> : null}
        <div role="status">{chain?.isDone ? <Outcome chain={chain.chain} noted={noted.trim()} /> : null}</div>
        {problem ? <ErrorBox error={problem} /> : null}
        <p class="dim">
          Note the hash, and keep it elsewhere: the next check with it proves that all records up to it are still the same. Without it, somebody
          with full access to the message bus could replace the whole log. <code>gpufn audit verify</code> checks the same.
        </p>
      </form>
    </Panel>
  );
}

function Outcome({ chain, noted }: { chain: Chain; noted: string }) {
  if (chain.fault) {
    return (
      <p>
        <Badge tone="bad">broken</Badge> Record {chain.fault.seq}: {chain.fault.reason}.
      </p>
    );
  }
  if (noted && !chain.hasNoted) {
    return (
      <p>
        <Badge tone="bad">broken</Badge> No record has the hash that you noted: the log was replaced, or its retention has passed.
      </p>
    );
  }
  return (
    <>
      <p>
        <Badge tone="ok">intact</Badge> {plural(chain.count, "record")}, {number(chain.first)} to {number(chain.last)}.
        {noted ? " The record whose hash you noted is among them." : ""}
      </p>
      <p>
        Hash of the last record: <code class="hash">{chain.hash || "none"}</code>
      </p>
    </>
  );
}
