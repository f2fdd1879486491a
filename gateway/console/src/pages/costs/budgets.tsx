import { money, percent } from "../../core/format";
import type { Budget } from "../../core/operate/costs";
import { Badge, Panel } from "../../ui/parts";
import { Bar } from "../../ui/progress";
import { Scroll } from "../../ui/scroll";

const NEAR = 0.8;

export function Budgets({ budgets, currency }: { budgets: readonly Budget[]; currency: string }) {
  return (
    <Panel title="Budgets" note="of this UTC month; compared once a minute">
      <Scroll label="Budgets">
        <table>
          <thead>
            <tr>
              <th>Of</th>
              <th>Month</th>
              <th>Used</th>
              <th class="number">Spent</th>
              <th class="number">Budget, {currency}</th>
              <th>When it is used up</th>
            </tr>
          </thead>
          <tbody>
            {budgets.map((budget) => (
              <tr key={budget.subject}>
                <td>{budget.subject.replace(":", " ")}</td>
                <td>{budget.month}</td>
                <td>
                  <Used budget={budget} />
                </td>
                <td class="number">{money(budget.spent)}</td>
                <td class="number">{money(budget.limit)}</td>
                <td>{budget.stops ? <Badge tone={budget.spent >= budget.limit ? "bad" : "quiet"}>calls are refused</Badge> : <span class="dim">only an event</span>}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </Panel>
  );
}

function Used({ budget }: { budget: Budget }) {
  const share = budget.limit ? budget.spent / budget.limit : 1;
  return (
    <>
      <Bar label={`Used part of the budget of ${budget.subject}`} share={share} tone={share >= 1 ? "bad" : share >= NEAR ? "warn" : "accent"} /> {percent(share)}
    </>
  );
}
