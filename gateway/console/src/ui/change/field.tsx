/** A labelled field of a dialog. */

import type { ComponentChildren } from "preact";
import { useId } from "preact/hooks";

interface FieldProps {
  readonly label: string;
  readonly name: string;
  readonly note?: string;
  readonly value?: string | number;
  readonly placeholder?: string;
  readonly required?: boolean;
  /** A number that may have a fraction, of at least 0. */
  readonly isNumber?: boolean;
  readonly pattern?: string;
}

export function Field({ label, name, note, value = "", placeholder, required = false, isNumber = false, pattern }: FieldProps) {
  const id = useId();
  const ofNumber = isNumber ? { type: "number" as const, min: 0, step: "any" } : {};
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <input
        id={id}
        name={name}
        defaultValue={String(value)}
        placeholder={placeholder}
        required={required}
        pattern={pattern}
        autocomplete="off"
        aria-describedby={note ? `${id}-note` : undefined}
        {...ofNumber}
      />
      <Note id={id} note={note} />
    </div>
  );
}

interface TextFieldProps {
  readonly label: string;
  readonly name: string;
  readonly note?: string;
  readonly rows?: number;
  readonly value?: string;
  readonly placeholder?: string;
  readonly required?: boolean;
}

export function TextField({ label, name, note, rows = 3, value, placeholder, required }: TextFieldProps) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <textarea
        id={id}
        name={name}
        rows={rows}
        placeholder={placeholder}
        required={required}
        spellcheck={false}
        autocomplete="off"
        defaultValue={value}
        aria-describedby={note ? `${id}-note` : undefined}
      />
      <Note id={id} note={note} />
    </div>
  );
}

interface ChoiceProps {
  readonly label: string;
  readonly name: string;
  readonly options: Readonly<Record<string, string>>;
  readonly value?: string;
  readonly note?: string;
}

export function Choice({ label, name, options, value, note }: ChoiceProps) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      <select id={id} name={name} aria-describedby={note ? `${id}-note` : undefined}>
        {Object.entries(options).map(([key, text]) => (
          <option key={key} value={key} selected={key === value}>
            {text}
          </option>
        ))}
      </select>
      <Note id={id} note={note} />
    </div>
  );
}

function Note({ id, note }: { id: string; note: ComponentChildren }) {
  return note ? (
    <p class="dim" id={`${id}-note`}>
      {note}
    </p>
  ) : null;
}
