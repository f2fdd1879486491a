import { useLines } from "../../../api/lines";
import { LogView } from "../../../ui/log-view";
import { Panel } from "../../../ui/parts";

export function LogsTab({ name }: { name: string }) {
  const log = useLines(`/v1/functions/${name}/logs?tail=1000&follow=true`);
  return (
    <Panel title="Logs" note={log.isLive ? "live; newest at the end" : "connecting"}>
      <LogView log={log} empty="Its workers have written nothing yet. What a call prints appears here." />
    </Panel>
  );
}
