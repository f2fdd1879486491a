import { Link } from "../../ui/router";

const SHOWN = 8;

/** The functions with workers on a node, with their number. */
export function FunctionCounts({ functions }: { functions: Readonly<Record<string, number>> }) {
  const entries = Object.entries(functions);
  if (entries.length === 0) {
    return <span class="dim">none</span>;
  }
  return (
    <>
      {entries.slice(0, SHOWN).map(([name, count], index) => (
        <span key={name}>
          {index ? ", " : ""}
          {count} of <Link to={`/functions/${name}`}>{name}</Link>
        </span>
      ))}
      {entries.length > SHOWN ? ` and ${entries.length - SHOWN} more functions` : ""}
    </>
  );
}
