import { useMay } from "../../api/principal";
import type { Volume } from "../../api/records";
import { send } from "../../api/request";
import { useResource } from "../../api/resource";
import { bytes, number, plural, time } from "../../core/format";
import type { File } from "../../core/data/tree";
import { Ask } from "../../ui/change/ask";
import { ErrorBox, Loading, Panel } from "../../ui/parts";
import { go, setQuery } from "../../ui/router";
import { Scroll } from "../../ui/scroll";
import type { PageProps } from "..";
import { Tree } from "./tree";

export default function VolumePage({ parameters, query }: PageProps) {
  const name = parameters["name"] ?? "";
  const { data: volume, problem } = useResource<Volume>(`/v1/volumes/${name}`);
  const mayDeploy = useMay("deploy", name);
  if (volume === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the volume" />;
  }
  const newest = volume.versions[volume.versions.length - 1]?.number ?? 0;
  const version = Number(query["version"] ?? newest);
  return (
    <div class="page">
      <div class="title">
        <h1>{volume.name}</h1>
        <span class="dim">
          {plural(volume.versions.length, "version")} kept, {bytes(volume.stored_bytes)} stored
        </span>
        {mayDeploy ? (
          <span class="actions">
            <Ask
              label="Delete the volume"
              title={`Delete the volume ${volume.name}?`}
              isDangerous
              onSubmit={async () => {
                await send(`/v1/volumes/${name}`, { method: "DELETE" });
                go("/volumes");
              }}
            >
              <p>All of its versions are deleted. Workers that read it keep what they have until they end.</p>
            </Ask>
          </span>
        ) : null}
      </div>
      <Content name={name} version={version} isNewest={version === newest} folder={query["folder"] ?? ""} />
      <Panel title="Versions" note="newest first">
        <Scroll label="Versions">
          <table>
            <thead>
              <tr>
                <th class="number">Version</th>
                <th>Committed</th>
                <th class="number">Files</th>
                <th class="number">Size</th>
                <th />
              </tr>
            </thead>
            <tbody>
              {[...volume.versions].reverse().map((each) => (
                <tr key={each.number} aria-selected={each.number === version}>
                  <td class="number">{each.number}</td>
                  <td>{time(each.created_at)}</td>
                  <td class="number">{number(each.files)}</td>
                  <td class="number">{bytes(each.bytes)}</td>
                  <td>
                    <button type="button" disabled={each.number === version} aria-label={`Files of version ${each.number}`} onClick={() => setQuery({ version: each.number === newest ? "" : String(each.number), folder: "" })}>
                      Files
                    </button>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      </Panel>
    </div>
  );
}

interface ContentProps {
  readonly name: string;
  readonly version: number;
  readonly isNewest: boolean;
  readonly folder: string;
}

function Content({ name, version, isNewest, folder }: ContentProps) {
  const { data, problem } = useResource<{ version: number; files: readonly File[] }>(`/v1/volumes/${name}/tree?version=${version}`);
  if (data === null) {
    return problem ? <ErrorBox error={problem} /> : <Loading what="the files" />;
  }
  return (
    <Panel title={`Files of version ${data.version}`} note={`${isNewest ? "the newest; " : ""}${plural(data.files.length, "file")}`}>
      <Tree volume={name} files={data.files} path={folder} />
    </Panel>
  );
}
