import type { ShownBody } from "../api/body";
import { bytes, visible } from "../core/format";

export function BodyView({ body, name }: { body: ShownBody; name: string }) {
  return (
    <>
      {body.text === null ? null : (
        <pre class="box" tabIndex={0}>
          {visible(body.text)}
        </pre>
      )}
      <p class="dim">
        {bytes(body.blob.size)} of {visible(body.contentType) || "an unknown type"}{" "}
        <button type="button" class="plain" onClick={() => download(body.blob, name)}>
          Download
        </button>
      </p>
    </>
  );
}

function download(blob: Blob, name: string): void {
  // As bytes: a page of the user's making must not open with the rights of the console.
  const url = URL.createObjectURL(new Blob([blob], { type: "application/octet-stream" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
