/** A button that downloads a file of the API. It never opens in the browser: it would have the rights of the console. */

import { useState } from "preact/hooks";
import { send } from "../api/request";
import { ErrorBox } from "./parts";

interface DownloadProps {
  readonly path: string;
  readonly name: string;
  readonly label: string;
  readonly of?: string;
}

export function Download({ path, name, label, of }: DownloadProps) {
  const [isBusy, setBusy] = useState(false);
  const [problem, setProblem] = useState<unknown>(null);
  async function load(): Promise<void> {
    setBusy(true);
    setProblem(null);
    try {
      save(await (await send(path)).blob(), name);
    } catch (error) {
      setProblem(error);
    } finally {
      setBusy(false);
    }
  }
  return (
    <>
      <button type="button" disabled={isBusy} aria-label={of ? `${label} ${of}` : undefined} onClick={() => void load()}>
        {label}
      </button>
      {problem ? <ErrorBox error={problem} /> : null}
    </>
  );
}

export function save(blob: Blob, name: string): void {
  const url = URL.createObjectURL(new Blob([blob], { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
