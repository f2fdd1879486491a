/** Folding of temporary functions in tables of usage and costs. */

import { useMemo } from "preact/hooks";
import { useResource } from "../api/resource";
import { chargedTo, existingNames, isServed } from "../core/operate/charged";
import { setQuery } from "./router";

/** Return the function that folds a name. The functions that exist are read only if a name needs it. */
export function useCharged(names: readonly string[], isFolded: boolean): (name: string) => string {
  const functions = useResource<{ functions: readonly { name: string }[] }>(isFolded && names.some(isServed) ? "/v1/functions" : "");
  return useMemo(() => {
    const existing = functions.data === null ? null : existingNames(functions.data.functions);
    return isFolded ? (name: string) => chargedTo(name, existing) : (name: string) => name;
  }, [functions.data, isFolded]);
}

export function ListAll({ isFolded }: { isFolded: boolean }) {
  return (
    <label>
      <input type="checkbox" checked={!isFolded} onChange={(event) => setQuery({ all: event.currentTarget.checked ? "yes" : "" })} /> list terminals, variants and temporary functions
    </label>
  );
}
