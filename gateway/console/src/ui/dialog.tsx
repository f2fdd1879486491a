/** A dialog that asks before a change, sends it, and shows its error. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ErrorBox } from "./parts";

interface DialogProps {
  readonly title: string;
  readonly action: string;
  readonly isDangerous?: boolean;
  readonly onClose: () => void;
  /** Sends the change. The dialog closes when it has succeeded. */
  readonly onSubmit: (form: FormData) => Promise<void>;
  readonly children: ComponentChildren;
}

export function Dialog({ title, action, isDangerous = false, onClose, onSubmit, children }: DialogProps) {
  const element = useRef<HTMLDialogElement>(null);
  const [error, setError] = useState<unknown>(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => element.current?.showModal(), []);
  async function submit(event: SubmitEvent): Promise<void> {
    event.preventDefault();
    setBusy(true);
    try {
      await onSubmit(new FormData(event.currentTarget as HTMLFormElement));
      onClose();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }
  return (
    <dialog ref={element} onClose={onClose} aria-label={title}>
      <form onSubmit={(event) => void submit(event)}>
        <h2>{title}</h2>
        {children}
        {error ? <ErrorBox error={error} /> : null}
        <div class="actions">
          <button type="button" onClick={onClose}>
            Cancel
          </button>
          <button type="submit" class={isDangerous ? "danger" : "primary"} disabled={isBusy}>
            {action}
          </button>
        </div>
      </form>
    </dialog>
  );
}
