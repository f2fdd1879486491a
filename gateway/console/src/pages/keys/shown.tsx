import { useEffect, useRef, useState } from "preact/hooks";
import { signIn } from "../../api/request";
import { ErrorBox } from "../../ui/parts";

export interface NewSecret {
  readonly id: string;
  readonly key: string;
  /** The session of this page needs it: it is the first key, or the one that the session had. */
  readonly signsIn: boolean;
}

/** A new secret, once. Only its button closes the dialog, and nothing is read from the API before: without the key, the
 * page might be signed out, and the secret lost. */
export function Shown({ secret, onClose }: { secret: NewSecret; onClose: () => void }) {
  const element = useRef<HTMLDialogElement>(null);
  const isStored = useRef(false);
  const [isCopied, setCopied] = useState(false);
  const [problem, setProblem] = useState<unknown>(null);
  useEffect(() => element.current?.showModal(), []);
  async function close(): Promise<void> {
    isStored.current = true;
    if (secret.signsIn) {
      try {
        await signIn({ key: secret.key });
        location.reload();
      } catch (error) {
        setProblem(error);
      }
    } else {
      onClose();
    }
  }
  return (
    <dialog
      ref={element}
      aria-label={`The key ${secret.id}`}
      onCancel={(event) => event.preventDefault()}
      onClose={() => {
        if (!isStored.current) {
          element.current?.showModal(); // a browser closes it at the second Escape
        }
      }}
    >
      <div class="dialog-parts">
        <h2>The key {secret.id}</h2>
        <p>Store it now: it is not shown again.</p>
        <pre class="box" tabIndex={0} role="textbox" aria-readonly="true" aria-label="The key">
          {secret.key}
        </pre>
        <span>
          <button type="button" onClick={() => void navigator.clipboard.writeText(secret.key).then(() => setCopied(true), setProblem)}>
            Copy
          </button>{" "}
          <span role="status">{isCopied ? "copied" : ""}</span>
        </span>
        {problem ? <ErrorBox error={problem} /> : null}
        <div class="actions">
          <button type="button" class="primary" onClick={() => void close()}>
            {secret.signsIn ? "I have stored it: sign in with it" : "I have stored it"}
          </button>
        </div>
      </div>
    </dialog>
  );
}
