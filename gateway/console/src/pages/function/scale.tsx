import { post } from "../../api/request";
import type { FunctionLive, Spec } from "../../api/views";
import { Dialog } from "../../ui/dialog";

interface ScaleDialogProps {
  readonly name: string;
  readonly live: FunctionLive;
  readonly spec: Spec;
  readonly onClose: () => void;
}

/** Set the bounds of the worker count. An empty field goes back to the function's declaration. */
export function ScaleDialog({ name, live, spec, onClose }: ScaleDialogProps) {
  async function scale(form: FormData): Promise<void> {
    await post(`/v1/functions/${name}/scale`, {
      min_workers: bound(form.get("min_workers")),
      max_workers: bound(form.get("max_workers")),
    });
  }
  const declared = `As declared: ${spec.scaling.min_workers} to ${spec.scaling.max_workers}.`;
  return (
    <Dialog title={`Scale ${name}`} action="Scale" onClose={onClose} onSubmit={scale}>
      <p class="dim">{declared} An empty field means that. The bounds hold until the next change, also for later deploys.</p>
      <div class="field">
        <label for="min_workers">Least workers</label>
        <input id="min_workers" name="min_workers" type="number" min={0} value={live.min_workers ?? ""} placeholder={String(spec.scaling.min_workers)} />
      </div>
      <div class="field">
        <label for="max_workers">Most workers</label>
        <input id="max_workers" name="max_workers" type="number" min={0} value={live.max_workers ?? ""} placeholder={String(spec.scaling.max_workers)} />
      </div>
    </Dialog>
  );
}

function bound(value: FormDataEntryValue | null): number | null {
  return typeof value === "string" && value !== "" ? Number(value) : null;
}
