/** The address of a page: path, parameters and query. Pure. */

export const BASE = "/console";

export type Query = Readonly<Record<string, string>>;

export interface Address {
  /** Below `/console`, decoded: "/functions/prod/search/predict". */
  readonly path: string;
  readonly query: Query;
}

export function addressOf(pathname: string, search: string): Address {
  const below = pathname.startsWith(BASE) ? pathname.slice(BASE.length) : pathname;
  let path = below.replace(/\/+$/, "") || "/";
  try {
    path = decodeURI(path);
  } catch {
    // An address that is not valid UTF-8 names no page.
  }
  return { path, query: Object.fromEntries(new URLSearchParams(search)) };
}

/** The address as a browser shows it. Empty parameters are left out. */
export function href(path: string, query: Query = {}): string {
  const given = Object.entries(query).filter(([, value]) => value !== "");
  const text = new URLSearchParams(given).toString();
  return `${BASE}${path === "/" ? "" : encodeURI(path)}${text ? `?${text}` : ""}`;
}

/** The parameters of `path` if it matches `pattern`: `:id` is one segment, `*name` is the rest. */
export function matched(pattern: string, path: string): Query | null {
  const wanted = pattern.split("/");
  const given = path.split("/");
  const found: Record<string, string> = {};
  for (const [index, part] of wanted.entries()) {
    if (part.startsWith("*")) {
      const rest = given.slice(index).join("/");
      return rest ? { ...found, [part.slice(1)]: rest } : null;
    }
    const segment = given[index];
    if (segment === undefined || segment === "" !== (part === "")) {
      return null;
    }
    if (part.startsWith(":")) {
      found[part.slice(1)] = segment;
    } else if (part !== segment) {
      return null;
    }
  }
  return given.length === wanted.length ? found : null;
}
