/** A button whose change is sent only after a question. */

import type { ComponentChildren } from "preact";
import { useRef, useState } from "preact/hooks";
import { Dialog } from "../dialog";

interface AskProps {
  readonly label: string;
  readonly title: string;
  /** What the button of the dialog says. Default: the label. */
  readonly action?: string;
  readonly isDangerous?: boolean;
  /** Names the button to screen readers, where the same label is in many rows. */
  readonly of?: string;
  readonly onSubmit: (form: FormData) => Promise<void>;
  readonly children: ComponentChildren;
}

export function Ask({ label, title, action = label, isDangerous = false, of, onSubmit, children }: AskProps) {
  const [isOpen, setOpen] = useState(false);
  const button = useRef<HTMLButtonElement>(null);
  function close(): void {
    setOpen(false);
    setTimeout(() => button.current?.focus()); // its row may be gone by then
  }
  return (
    <>
      <button type="button" ref={button} class={isDangerous ? "danger" : ""} aria-label={of ? `${label} ${of}` : undefined} onClick={() => setOpen(true)}>
        {label}
      </button>
      {isOpen ? (
        <Dialog title={title} action={action} isDangerous={isDangerous} onClose={close} onSubmit={onSubmit}>
          {children}
        </Dialog>
      ) : null}
    </>
  );
}
