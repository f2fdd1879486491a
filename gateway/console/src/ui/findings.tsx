/** What is wrong, why, and where to look. */

import type { Finding } from "../api/views";
import { visible } from "../core/format";
import { Badge, Empty } from "./parts";
import { Link } from "./router";

export function Findings({ findings, showSubject = true }: { findings: readonly Finding[]; showSubject?: boolean }) {
  if (findings.length === 0) {
    return <Empty title="Nothing is wrong." />;
  }
  return (
    <ul class="findings">
      {findings.map((each) => (
        <li key={`${each.kind} ${each.subject} ${each.code}`}>
          <span>
            <Badge tone={each.severity === "critical" ? "bad" : "warn"}>{each.severity}</Badge>
          </span>
          <p>
            {showSubject ? <Subject finding={each} /> : null}
            {visible(each.title)} <code class="dim">{each.code}</code>
          </p>
          {each.text ? <p class="dim">{visible(each.text)}</p> : null}
        </li>
      ))}
    </ul>
  );
}

function Subject({ finding }: { finding: Finding }) {
  if (finding.kind === "function") {
    return (
      <>
        <Link to={`/functions/${finding.subject}`} query={{ tab: finding.code === "errors" ? "errors" : "" }}>
          {finding.subject}
        </Link>
        :{" "}
      </>
    );
  }
  return finding.subject ? <>node {finding.subject}: </> : null;
}
