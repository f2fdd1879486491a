import { TEMPORARY } from "../core/operate/charged";
import { Link } from "./router";

/** A link to a function. A method of a class, as in `model.predict`, leads to the class. */
export function FunctionLink({ name }: { name: string }) {
  return name === TEMPORARY ? <span class="dim">{name}</span> : <Link to={`/functions/${name.split(".")[0] ?? ""}`}>{name}</Link>;
}
