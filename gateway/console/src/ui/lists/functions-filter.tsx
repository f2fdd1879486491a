/** The function that a list is about, in the address: `?function=prod/search/predict`. */

import { useEffect, useState } from "preact/hooks";
import { setQuery } from "../router";

export function FunctionFilter({ name }: { name: string }) {
  const [text, setText] = useState(name);
  useEffect(() => setText(name), [name]);
  return (
    <form
      class="toolbar"
      role="search"
      onSubmit={(event) => {
        event.preventDefault();
        setQuery({ function: text.trim() });
      }}
    >
      <input type="search" aria-label="Name of a function" placeholder="Name of a function, then Enter" value={text} onInput={(event) => setText(event.currentTarget.value)} />
      {name ? (
        <button type="button" onClick={() => setQuery({ function: "" })}>
          Show all
        </button>
      ) : null}
    </form>
  );
}
