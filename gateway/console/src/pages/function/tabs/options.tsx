import type { FunctionView } from "../../../api/views";
import { Panel } from "../../../ui/parts";
import { visible } from "../../../core/format";
import { optionChanges } from "../../../core/specdiff";
import type { Json } from "../../../core/delta";
import { Scroll } from "../../../ui/scroll";

export function OptionsTab({ view }: { view: FunctionView }) {
  const { methods: _, ...options } = view.spec;
  const rows = optionChanges({}, options as unknown as Json);
  return (
    <Panel title="Options" note={`of revision ${view.active}, as deployed`}>
      <Scroll label="Options">
        <table>
          <thead>
            <tr>
              <th>Option</th>
              <th>Value</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.option}>
                <td class="mono">{row.option}</td>
                <td class="mono wrap">{visible(row.after)}</td>
              </tr>
            ))}
            <tr>
              <td class="mono">env</td>
              <td class="wrap">{view.env.length ? `${view.env.join(", ")} (names only)` : "none"}</td>
            </tr>
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}
