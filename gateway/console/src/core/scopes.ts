/** The scopes of a key (docs/access.md). Pure. */

export type Verb = "read" | "deploy" | "invoke" | "admin";

const GIVEN_BY: Readonly<Record<Verb, readonly Verb[]>> = {
  read: ["read", "deploy"],
  deploy: ["deploy"],
  invoke: ["invoke"],
  admin: [],
};

/** Whether the scopes give a verb for a function, or without a name for some function. */
export function covers(scopes: readonly string[], verb: Verb, functionName?: string): boolean {
  if (scopes.includes("admin")) {
    return true;
  }
  return scopes.some((scope) => {
    const colon = scope.indexOf(":");
    const given = colon < 0 ? scope : scope.slice(0, colon);
    const pattern = colon < 0 ? "*" : scope.slice(colon + 1);
    const isGiven = (GIVEN_BY[verb] as readonly string[]).includes(given) && (verb !== "invoke" || colon >= 0);
    return isGiven && (functionName === undefined || isNamedBy(pattern, functionName));
  });
}

/** Whether a pattern such as `prod/search/*` names a function. */
export function isNamedBy(pattern: string, functionName: string): boolean {
  if (pattern === "*") {
    return true;
  }
  const base = functionName.split("=")[0] ?? functionName;
  const parts = base.includes("/") ? base.split("/") : ["default", "default", base];
  const wanted = pattern.includes("/") ? pattern.split("/") : ["default", "default", pattern];
  const padded = wanted.length === 2 && wanted[1] === "*" ? [wanted[0], "*", "*"] : wanted;
  return padded.length === parts.length && padded.every((each, index) => each === "*" || each === parts[index]);
}

/** Whether the scopes give a verb for what belongs to no function, such as a node. */
export function coversEverything(scopes: readonly string[], verb: Verb): boolean {
  return scopes.includes("admin") || (GIVEN_BY[verb] as readonly string[]).some((given) => scopes.includes(given));
}

/** Whether the scopes give a verb for all functions that a pattern such as `prod/*` names. */
export function coversPattern(scopes: readonly string[], verb: Verb, pattern: string): boolean {
  const [environment, app = "*"] = pattern.split("/");
  const isOfAll = pattern === "*" || environment === "*";
  return coversEverything(scopes, verb) || (!isOfAll && covers(scopes, verb, `${environment ?? ""}/${app === "*" ? ANY : app}/${ANY}`));
}

const ANY = "?"; // a name that only `*` matches
