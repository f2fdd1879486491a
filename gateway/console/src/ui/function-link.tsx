import { Link } from "./router";

/** A link to a function. A method of a class, as in `model.predict`, leads to the class. */
export function FunctionLink({ name }: { name: string }) {
  return <Link to={`/functions/${name.split(".")[0] ?? ""}`}>{name}</Link>;
}
