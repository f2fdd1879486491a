import { useState } from "preact/hooks";
import { useMay } from "../../api/principal";
import { shownBody, type ShownBody } from "../../api/body";
import { send } from "../../api/request";
import type { Call } from "../../api/views";
import { BodyView } from "../../ui/body-view";
import { ErrorBox, Panel } from "../../ui/parts";

/** The result, read on request: it may be large, or private. */
export function Result({ call }: { call: Call }) {
  const [body, setBody] = useState<ShownBody | null>(null);
  const [problem, setProblem] = useState<unknown>(null);
  const mayInvoke = useMay("invoke", call.function.split(".")[0] ?? "");
  if (call.state !== "succeeded" || !mayInvoke) {
    return null;
  }
  async function load(): Promise<void> {
    try {
      setBody(await shownBody(await send(`/v1/invocations/${call.id}/result`)));
    } catch (error) {
      setProblem(error);
    }
  }
  return (
    <Panel title="Result">
      <div class="body">
        {problem ? <ErrorBox error={problem} /> : null}
        {body ? (
          <BodyView body={body} name={call.id} />
        ) : (
          <span>
            <button type="button" onClick={() => void load()}>
              Show the result
            </button>
          </span>
        )}
      </div>
    </Panel>
  );
}
