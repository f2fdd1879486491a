/** A button that deletes what is at a path of the API, after a question. */

import type { ComponentChildren } from "preact";
import { send } from "../../api/request";
import { Ask } from "./ask";

interface DeleteProps {
  readonly path: string;
  readonly label: string;
  readonly title: string;
  /** Names the button to screen readers, where the same label is in many rows. */
  readonly of: string;
  readonly onDone: () => void | Promise<void>;
  readonly children: ComponentChildren;
}

export function Delete({ path, label, title, of, onDone, children }: DeleteProps) {
  async function submit(): Promise<void> {
    await send(path, { method: "DELETE" });
    await onDone();
  }
  return (
    <Ask label={label} of={of} title={title} isDangerous onSubmit={submit}>
      {children}
    </Ask>
  );
}
